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
from penstock.errors import InvalidData, InvalidPipeline, TokenizersDiffer
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


ANSWERED = [ASKED, {"role": "assistant", "content": "yes"}]

PARTS = [{"type": "text", "text": "an ans"}, {"type": "text", "text": "wer?", "image": None}]

CALLED = [
    ASKED,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1, "b": None}}}],
    },
    {"role": "tool", "content": "4", "tool_calls": None},
]


def prompts_of(chat: ChatFormat | None, content: Any, **options: Any) -> Any:
    return PromptDataset([{"prompt": content}], chat=chat, **options)().prompt(0)


def test_turns_of_the_assistant_at_the_end_are_the_answer_and_not_the_prompt(chat: ChatFormat) -> None:
    for content in (ANSWERED, [*ANSWERED, ANSWERED[-1]]):
        prompt = prompts_of(chat, content)
        assert list(prompt.content) == chat.prompt([ASKED]) == chat.prompt(content)
        assert prompt.meta["messages"] == [ASKED]
        assert prompt.meta["row"] == {"prompt": content}
    with pytest.raises(InvalidData, match=r"column 'prompt': expected messages that end with one of the user"):
        prompts_of(chat, ANSWERED[1:])


def test_parts_that_are_text_are_joined_and_any_other_is_refused_by_row_and_part(chat: ChatFormat) -> None:
    assert list(prompts_of(chat, [{"role": "user", "content": PARTS}]).content) == chat.prompt([ASKED])
    for part, kind in (({"type": "image_url", "image_url": {}}, "'image_url'"), (7, "7"), ({"type": "text"}, "'text'")):
        with pytest.raises(
            InvalidData, match=rf"messages\[1\]\.content\[2\]: expected a part that is text.*got {kind}"
        ):
            prompts_of(chat, [TOLD, {"role": "user", "content": [*PARTS, part]}])
    with pytest.raises(InvalidData, match=r"messages\[0\]\.content: expected text or a list of parts"):
        prompts_of(chat, [{"role": "user", "content": 7}])


def test_nulls_that_tables_give_to_messages_are_removed_at_any_depth(chat: ChatFormat, tmp_path: Path) -> None:
    messages = prompts_of(chat, CALLED[:1] + CALLED[2:]).meta["messages"]
    assert messages == [ASKED, {"role": "tool", "content": "4"}]

    of_calls = CHATML.replace("message['content']", "(message['content'] or message['tool_calls'] | tojson)")
    calling = ChatFormat(PretrainedTokenizer(tokenizer_folder(tmp_path / "calling", of_calls)))
    call = prompts_of(calling, CALLED).meta["messages"][1]
    assert call == {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}


def test_a_row_of_which_a_part_is_no_text_fails_alone_and_is_named(chat: ChatFormat) -> None:
    rows = [{"prompt": [ASKED]}, {"prompt": [{"role": "user", "content": [{"type": "image"}]}]}]

    prompts = PromptDataset(rows, chat=chat, shuffle=False)()

    assert list(prompts.prompt(0).content) == chat.prompt([ASKED])
    with pytest.raises(InvalidData, match=r"row 1.*messages\[0\]\.content\[0\]: expected a part that is text"):
        prompts.prompt(1)


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
