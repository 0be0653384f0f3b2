"""Tokenizers with the same vocabulary that split text in different ways are different tokenizers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from penstock import ReceiveChannel, SourceEnv, StageInfo, TrajectoryGroup, source
from penstock.chat import ChatFormat
from penstock.data import PromptDataset
from penstock.errors import InvalidPipeline, TokenizersDiffer
from penstock.policies import NoOpPolicy, PretrainedTokenizer, check_tokenizers, tokenizer_identity

TEXT = "Mia has 12 apples and buys 345 more.\nHow many apples does Mia have now?\n\n#### 357\nShe's 20 books."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a Qwen2 tokenizer that was trained with another pre-tokenizer than Qwen2's own."""
    folder = tmp_path_factory.mktemp("qwen2")
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>", "<|im_end|>"], initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator([TEXT] * 9, trainer)
    trained.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return folder


@pytest.fixture(scope="module")
def rebuilt(folder: Path) -> Any:
    """Return the tokenizer that transformers makes of the folder."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_id = tokenizer.eos_token_id
    return tokenizer


@dataclass(frozen=True)
class Trains:
    tokenizer: Any

    def stage_info(self) -> StageInfo:
        return StageInfo(tokenizers=(self.tokenizer,))

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        """Take nothing."""


def test_transformers_rebuilds_a_tokenizer_of_the_same_vocabulary_that_splits_otherwise(
    folder: Path, rebuilt: Any
) -> None:
    ours = PretrainedTokenizer(folder)

    assert ours.get_vocab() == rebuilt.get_vocab()
    assert len(ours.encode(TEXT)) != len(rebuilt.encode(TEXT, add_special_tokens=False))
    with pytest.raises(TokenizersDiffer, match="of different splitting of text\n"):
        check_tokenizers({"data": ours, "trainer": rebuilt})


def test_a_pipeline_whose_template_and_trainer_split_otherwise_is_refused(folder: Path, rebuilt: Any) -> None:
    chat = ChatFormat(PretrainedTokenizer(folder))
    prompts = PromptDataset([{"prompt": TEXT}], chat=chat)

    for env in (SourceEnv(prompts, NoOpPolicy()), SourceEnv(prompts, NoOpPolicy(), chat=chat)):
        with pytest.raises(InvalidPipeline, match="splitting of text"):
            source(env).sink(Trains(rebuilt)).check()
        source(env).sink(Trains(PretrainedTokenizer(folder))).check()


def test_the_same_tokenizer_read_by_another_library_is_the_same(folder: Path) -> None:
    fast: Any = transformers.PreTrainedTokenizerFast
    theirs = fast(
        tokenizer_file=str(folder / "tokenizer.json"),
        eos_token="<|im_end|>",  # noqa: S106 (no password)
        chat_template=(folder / "chat_template.jinja").read_text(),
    )

    check_tokenizers({"ours": PretrainedTokenizer(folder), "theirs": theirs})
    check_tokenizers(
        {"ours": PretrainedTokenizer(folder), "library": Tokenizer.from_file(str(folder / "tokenizer.json"))}
    )


def test_ids_of_a_text_are_compared_even_of_words_that_only_the_vocabulary_knows() -> None:
    def splitting(pattern: str) -> Tokenizer:
        tokens = ["a", "b", "xa", "xb", "x"]
        tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [("x", "a"), ("x", "b")]))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
        return tokenizer

    assert tokenizer_identity(splitting("x")).text_hash != tokenizer_identity(splitting("y")).text_hash


class LettersAToC:
    """Encodes three letters; any other is a KeyError."""

    eos_id = 3

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "b": 1, "c": 2, "end": 3}

    def encode(self, text: str) -> list[int]:
        return [{"a": 0, "b": 1, "c": 2}[letter] for letter in text]


def test_a_tokenizer_that_encodes_none_of_the_texts_is_not_compared_by_them() -> None:
    assert tokenizer_identity(LettersAToC()).text_hash is None
