"""The tokenizer in a folder, beside the libraries that made the folder."""

import json
import pickle
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers, processors

from penstock import ReceiveChannel, SendChannel, StageInfo, TrajectoryGroup, source
from penstock._stages.tokenizers.pretrained_tokenizer import copy_tokenizer
from penstock.errors import InvalidConfig, InvalidPipeline
from penstock.policies import PretrainedTokenizer, Tokenizer, check_tokenizers, tokenizer_identity

WORDS = ["what", "is", "one", "and", "?", "[unknown]"]


@dataclass(frozen=True)
class Says:
    tokenizer: Tokenizer

    def stage_info(self) -> StageInfo:
        return StageInfo(tokenizers=(self.tokenizer,))

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        """Send nothing."""


@dataclass(frozen=True)
class Collect:
    tokenizer: Tokenizer

    def stage_info(self) -> StageInfo:
        return StageInfo(tokenizers=(self.tokenizer,))

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        """Take nothing."""


def backend(words: list[str] = WORDS) -> tokenizers.Tokenizer:
    """Return a tokenizer of words, which would add a token at either end."""
    made = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[unknown]"))  # noqa: S106 (no password)
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens([AddedToken("<begin>", special=True), AddedToken("<end>", special=True)])
    made.post_processor = processors.TemplateProcessing(
        single="<begin> $A <end>", special_tokens=[("<begin>", len(words)), ("<end>", len(words) + 1)]
    )
    made.enable_truncation(3)
    return made


def saved(folder: Path, config: dict[str, Any] | None = None, words: list[str] = WORDS) -> Path:
    folder.mkdir()
    backend(words).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"} if config is None else config))
    return folder


def test_text_becomes_its_tokens_and_nothing_is_added_or_cut(tmp_path: Path) -> None:
    tokenizer: Tokenizer = PretrainedTokenizer(saved(tmp_path / "words"))

    ids = tokenizer.encode("what is one and one ?")

    assert list(ids) == [0, 1, 2, 3, 2, 4]
    assert tokenizer.decode([*ids[:2], 7]) == "what is <end>"
    assert tokenizer.eos_id == 7


@pytest.mark.parametrize("entry", ["<end>", {"content": "<end>", "special": True}])
def test_the_end_token_is_given_by_name_or_with_its_properties(tmp_path: Path, entry: object) -> None:
    assert PretrainedTokenizer(saved(tmp_path / "words", {"eos_token": entry})).eos_id == 7


@pytest.mark.parametrize("entry", ["<end>", {"content": "<end>", "special": True}])
@pytest.mark.parametrize("config", [None, {}, {"eos_token": None}, {"added_tokens_decoder": {}}, {"eos_token": "one"}])
def test_special_tokens_may_be_in_a_file_of_their_own(tmp_path: Path, entry: object, config: Any) -> None:
    folder = saved(tmp_path / "words", config or {})
    if config is None:
        (folder / "tokenizer_config.json").unlink()
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": entry, "additional_special_tokens": []}))

    assert PretrainedTokenizer(folder).eos_id == 7


def test_special_tokens_are_those_that_transformers_reads(tmp_path: Path) -> None:
    from transformers import AutoTokenizer  # noqa: PLC0415 (seconds, for one test)

    for number, listed in enumerate(({}, {"added_tokens_decoder": {"7": {"content": "<end>", "special": True}}})):
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "bos_token": "what", **listed}
        folder = saved(tmp_path / str(number), config)
        (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<begin>", "sep_token": "and"}))

        theirs: Any = AutoTokenizer.from_pretrained(folder)

        assert PretrainedTokenizer(folder).special_tokens_map == theirs.special_tokens_map


def test_a_template_of_its_own_file_or_of_the_configuration_is_a_part_of_the_identity(tmp_path: Path) -> None:
    plain = PretrainedTokenizer(saved(tmp_path / "plain"))
    configured = PretrainedTokenizer(saved(tmp_path / "configured", {"eos_token": "<end>", "chat_template": "{{ m }}"}))
    (saved(tmp_path / "filed") / "chat_template.jinja").write_text("{{ m }}")
    filed = PretrainedTokenizer(tmp_path / "filed")

    hashes = [tokenizer_identity(each).chat_template_hash for each in (plain, configured, filed)]

    assert hashes[0] is None
    assert hashes[1] == hashes[2] is not None


def test_templates_of_a_folder_are_read_by_name_and_copied(tmp_path: Path) -> None:
    folder = saved(tmp_path / "words")
    (folder / "chat_template.jinja").write_text("{{ m }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    (tmp_path / "copy").mkdir()

    copy_tokenizer(folder, tmp_path / "copy")

    for each in (folder, tmp_path / "copy"):
        assert PretrainedTokenizer(each).chat_template == {"default": "{{ m }}", "tool_use": "{{ tools }}"}


@pytest.mark.parametrize(
    ("file", "added"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"8": {"content": "<new>", "special": True}}}),
        ("tokenizer_config.json", {"additional_special_tokens": ["<new>"]}),
        ("tokenizer_config.json", {"extra_special_tokens": {"image_token": "<new>"}}),
        ("special_tokens_map.json", {"additional_special_tokens": [{"content": "<new>"}]}),
        ("added_tokens.json", {"<new>": 8}),
    ],
)
def test_a_token_that_only_another_file_adds_is_refused(file: str, added: Any, tmp_path: Path) -> None:
    folder = saved(tmp_path / "words")
    before = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps({**before, **added}))

    with pytest.raises(InvalidConfig, match="every token that the files beside it add, got none for '<new>'"):
        PretrainedTokenizer(folder)


def test_a_special_token_with_a_name_of_its_own_reaches_the_template(tmp_path: Path) -> None:
    config = {"eos_token": "<end>", "extra_special_tokens": {"image_token": "<begin>"}}

    tokenizer = PretrainedTokenizer(saved(tmp_path / "words", config))

    assert tokenizer.special_tokens_map == {"eos_token": "<end>", "image_token": "<begin>"}


def test_it_is_the_same_tokenizer_as_the_library_has_it_in_memory(tmp_path: Path) -> None:
    tokenizer = PretrainedTokenizer(saved(tmp_path / "words"))

    check_tokenizers({"folder": tokenizer, "library": backend()})

    assert tokenizer_identity(tokenizer).special_tokens == (("<begin>", 6), ("<end>", 7))


def test_it_is_the_same_tokenizer_as_transformers_loads_and_saves(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 (seconds, for one test)

    theirs = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend(),
        eos_token="<end>",  # noqa: S106 (no password)
        chat_template="{{ messages }}",
    )
    theirs.save_pretrained(tmp_path / "theirs")

    ours = PretrainedTokenizer(tmp_path / "theirs")

    check_tokenizers({"ours": ours, "theirs": theirs})
    assert ours.encode("one and one") == theirs.encode("one and one", add_special_tokens=False)
    fields = ("vocabulary_hash", "special_tokens", "eos_id", "chat_template_hash", "text_hash")
    assert [getattr(tokenizer_identity(ours), field) for field in fields] == [
        getattr(tokenizer_identity(theirs), field) for field in fields
    ]


def test_the_name_of_a_folder_in_the_hubs_cache_contains_its_revision(tmp_path: Path) -> None:
    (tmp_path / "snapshots").mkdir()

    tokenizer = PretrainedTokenizer(saved(tmp_path / "snapshots" / "0f1e2d"))

    assert tokenizer_identity(tokenizer).revision == "0f1e2d"


def test_it_travels_to_workers_as_its_folder(tmp_path: Path) -> None:
    tokenizer = PretrainedTokenizer(saved(tmp_path / "words"))

    pickled = pickle.dumps(tokenizer)

    assert len(pickled) < 500
    assert pickle.loads(pickled).encode("is ?") == [1, 4]  # noqa: S301 (our own bytes)


def test_a_missing_file_is_named_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"tokenizer.json: expected a tokenizer saved by"):
        PretrainedTokenizer(tmp_path)
    with pytest.raises(
        InvalidConfig, match=r"tokenizer_config.json: expected an eos_token of the vocabulary, here or in .*, got None"
    ):
        PretrainedTokenizer(saved(tmp_path / "words", {}))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_broken_file_is_named_with_its_path(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path / "words")
    (folder / name).write_text("{")

    with pytest.raises(InvalidConfig, match=rf"words/{name}: expected a .*: save it again"):
        PretrainedTokenizer(folder)


@pytest.mark.parametrize(("words", "fine"), [(WORDS, True), (WORDS[::-1], False)])
def test_a_run_looks_at_it_before_it_starts(tmp_path: Path, words: list[str], *, fine: bool) -> None:
    ours, theirs = (
        PretrainedTokenizer(saved(tmp_path / "ours")),
        PretrainedTokenizer(saved(tmp_path / "theirs", words=words)),
    )
    pipeline = source(Says(ours)).sink(Collect(theirs))

    with nullcontext() if fine else pytest.raises(InvalidPipeline, match="have tokenizers of different vocabulary"):
        pipeline.check()
