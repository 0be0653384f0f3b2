from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import pytest

from penstock.errors import InvalidConfig, TokenizersDiffer
from penstock.policies import TokenizerIdentity, check_tokenizers, tokenizer_identity


@dataclass
class Added:
    content: str
    special: bool


@dataclass
class Own:
    """A tokenizer, as far as its identity goes."""

    tokens: str = "abc."
    eos_id: int | None = 3
    chat_template: str | None = None
    name_or_path: str = "own"
    revision: str | None = None
    added_tokens_decoder: Mapping[int, Added] = field(default_factory=lambda: {3: Added(".", special=True)})

    def get_vocab(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}


class Bare:
    """Says nothing but its vocabulary."""

    def get_vocab(self) -> dict[str, int]:
        return Own().get_vocab()


def test_names_folders_and_revisions_make_no_other_tokenizer() -> None:
    check_tokenizers({"source": Own(), "teacher": Own(name_or_path="/models/own", revision="1f2e")})


def test_parts_that_one_side_does_not_know_are_not_compared() -> None:
    check_tokenizers({"source": Own(chat_template="{{ messages }}"), "teacher": Bare(), "trainer": Own()})


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (Own(tokens="acb."), "vocabulary"),
        (Own(tokens="abc.d"), "vocabulary"),
        (Own(added_tokens_decoder={3: Added(".", special=False)}), "special tokens"),
        (Own(eos_id=2), "end token"),
        (Own(tokens="abd.", chat_template="{{ other }}"), "vocabulary, chat template"),
    ],
)
def test_relevant_parts_are_compared_and_both_identities_reported(other: Own, what: str) -> None:
    one = Own(chat_template="{{ messages }}", revision="77aa")
    other.name_or_path = "another"

    with pytest.raises(TokenizersDiffer) as differ:
        check_tokenizers({"source": one, "trainer": other})

    heading, first, second = str(differ.value).split("\n  ")
    assert heading == f"source and trainer have tokenizers of different {what}"
    assert (first, second) == (str(tokenizer_identity(one)), str(tokenizer_identity(other)))
    assert first.startswith("own at 77aa: 4 tokens #")


def test_every_pair_that_differs_is_reported() -> None:
    parts = {"source": Own(), "teacher": Own(eos_id=1), "trainer": Own(eos_id=2)}

    with pytest.raises(TokenizersDiffer) as differ:
        check_tokenizers(parts)

    lines = [line for line in str(differ.value).splitlines() if not line.startswith(" ")]
    assert [line.split(" have")[0] for line in lines] == [
        "source and teacher",
        "source and trainer",
        "teacher and trainer",
    ]


def test_an_identity_travels_without_its_tokenizer() -> None:
    encoded = msgspec.json.encode(tokenizer_identity(Own()))

    arrived = msgspec.json.decode(encoded, type=TokenizerIdentity)

    check_tokenizers({"here": Own(), "there": arrived})
    with pytest.raises(TokenizersDiffer):
        check_tokenizers({"here": Own(tokens="xyz."), "there": arrived})


def test_a_tokenizer_without_a_vocabulary_has_no_identity() -> None:
    with pytest.raises(InvalidConfig, match=r"tokenizer: expected one with get_vocab\(\) -> {token: id}, got object"):
        tokenizer_identity(object())
