"""Prompts that are text begin with the tokens that begin a text, as transformers' tokenizers add them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
import transformers
from tests.fake_policy import FakePolicy
from tests.models_hf.chat_templates import CHATML, tokenizer_folder
from tokenizers import Tokenizer, processors

from penstock import SourceEnv
from penstock.chat import ChatFormat
from penstock.data import PromptDataset
from penstock.policies import PretrainedTokenizer
from penstock.testing import drive_source

BOS, EOS = "<|begin_of_text|>", "<|im_end|>"


def folder_with(tmp_path: Path, single: str | None) -> Path:
    """Return the folder of a tokenizer that makes a text to `single`."""
    folder = tokenizer_folder(tmp_path / "tokenizer", CHATML)
    path = str(folder / "tokenizer.json")
    if single is not None:
        tokenizer = Tokenizer.from_file(path)
        special = [(token, tokenizer.token_to_id(token)) for token in (BOS, EOS)]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
        tokenizer.save(path)
    return folder


def prompt_of(folder: Path, text: str) -> list[int]:
    """Return the tokens that a row of text has in a run."""
    rows = PromptDataset([{"prompt": text}])
    env = SourceEnv(rows, FakePolicy(), PretrainedTokenizer(folder), group_size=1, groups=1)
    (group,) = anyio.run(drive_source, env)
    tokens: list[int] = group.tokens[~group.loss_mask].tolist()
    return tokens


@pytest.mark.parametrize("single", [None, f"{BOS} $A", f"{BOS} {BOS} $A"])
@pytest.mark.parametrize("text", ["Hi", "an answer? ", BOS])
def test_a_text_is_prompted_as_transformers_tokenizes_it(tmp_path: Path, single: str | None, text: str) -> None:
    folder = folder_with(tmp_path, single)
    reference: Any = transformers.AutoTokenizer.from_pretrained(folder)

    tokens = prompt_of(folder, text)

    expected = reference(text).input_ids
    assert tokens == expected[1 if single == f"{BOS} $A" and text == BOS else 0 :]


def test_a_text_that_has_the_token_already_gets_no_second_one(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, f"{BOS} $A")

    assert prompt_of(folder, f"{BOS}Hi") == prompt_of(folder, "Hi")


def test_tokens_that_end_a_text_end_no_prompt(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, f"{BOS} $A {EOS}")

    tokens = prompt_of(folder, "Hi")

    assert PretrainedTokenizer(folder).decode(tokens) == f"{BOS}Hi"


def test_a_chat_template_writes_its_own(tmp_path: Path) -> None:
    tokenizer = PretrainedTokenizer(folder_with(tmp_path, f"{BOS} $A"))

    assert tokenizer.start_ids == tuple(tokenizer.encode(BOS))
    assert BOS not in tokenizer.decode(ChatFormat(tokenizer).prompt([{"role": "user", "content": "Hi"}]))
