"""Rows of a data set, as prompts by the template of a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.fake_policy import FakePolicy
from tests.models_hf.chat_templates import CHATML, MISTRAL, tokenizer_folder

from penstock import Batcher, SinkTrainer, SourceEnv, source
from penstock.chat import ChatFormat
from penstock.data import Mixture, PromptDataset
from penstock.errors import InvalidPipeline, TokenizersDiffer
from penstock.policies import PretrainedTokenizer
from penstock.testing import drive_source

ASKED: dict[str, Any] = {"role": "user", "content": "an answer?"}
TOLD = {"role": "system", "content": "short"}


@pytest.fixture
def chat(tmp_path: Path) -> ChatFormat:
    return ChatFormat(PretrainedTokenizer(tokenizer_folder(tmp_path / "tokenizer", CHATML)))


@pytest.mark.parametrize("content", ["an answer?", [ASKED], [TOLD, ASKED]])
async def test_rows_of_text_and_of_messages_are_prompted_by_the_template(chat: ChatFormat, content: Any) -> None:
    dataset = PromptDataset([{"prompt": content, "answer": "yes"}], chat=chat, system="short")

    (group,) = await drive_source(SourceEnv(dataset, FakePolicy(), chat.tokenizer, group_size=1, groups=1))

    assert group.tokens[~group.loss_mask].tolist() == chat.prompt([TOLD, ASKED])
    if isinstance(content, str):
        assert group.meta["prompt"] == content  # the form of the row, which reward functions take
    else:
        assert group.meta["messages"] == [TOLD, ASKED]
    assert group.meta["row"] == {"prompt": content, "answer": "yes"}


def test_a_chat_format_with_another_tokenizer_than_the_source_is_refused(chat: ChatFormat, tmp_path: Path) -> None:
    other = PretrainedTokenizer(tokenizer_folder(tmp_path / "other", MISTRAL))
    sampler = SourceEnv(PromptDataset([{"prompt": "?"}], chat=chat), FakePolicy(), other)

    with pytest.raises(InvalidPipeline, match="SourceEnv have tokenizers of different end token, chat template"):
        source(sampler).then(Batcher(max_tokens=64)).sink(SinkTrainer(_Trainer())).check()


def test_sets_of_one_mixture_have_one_tokenizer(chat: ChatFormat, tmp_path: Path) -> None:
    other = ChatFormat(PretrainedTokenizer(tokenizer_folder(tmp_path / "other", MISTRAL)))
    sets = [PromptDataset([{"prompt": "?"}], chat=each, name=name) for each, name in ((chat, "a"), (other, "b"))]

    with pytest.raises(TokenizersDiffer, match="a and b have tokenizers of different end token, chat template"):
        Mixture(sets, [1, 1])


class _Trainer:
    def step(self, _: Any) -> dict[str, float]:
        return {}
