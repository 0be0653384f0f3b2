"""The messages of a rollout's calls to tokens: what was sampled keeps its ids, and each branch has a reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.models_hf.chat_templates import CHATML, LLAMA, QWEN
from tests.stages.agents.served import chat_format, completion_of

from penstock._stages.agents import conversation_tree
from penstock._stages.agents.conversation_tree import CallPrompt, ConversationTree, KnownMessage
from penstock.chat import ChatFormat
from penstock.errors import InvalidData
from penstock.policies import Completion

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ONE: dict[str, Any] = {"role": "user", "content": "one?"}
TWO: dict[str, Any] = {"role": "user", "content": "two?"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "yes"}
SAMPLED = "ye s"
"""Other tokens than those of the answer's message, as where a parser changed the text."""


@pytest.fixture
def chat(tmp_path: Path) -> ChatFormat:
    return chat_format(tmp_path)


def completion(chat: ChatFormat, text: str = SAMPLED, *, end: bool = True) -> Completion:
    return completion_of(chat, text, end=end)


def answered(
    tree: ConversationTree, chat: ChatFormat, messages: list[Any], **options: Any
) -> tuple[CallPrompt, Completion]:
    """Record a call with the message `ANSWER`."""
    prompt, sampled = tree.prompt(messages, options.pop("tools", None)), completion(chat, **options)
    tree.record(prompt, ANSWER, sampled)
    return prompt, sampled


def begins_with(prompt: CallPrompt, *parts: Any) -> bool:
    return bool(np.concatenate(parts).tolist() == prompt.tokens[: sum(map(len, parts))].tolist())


@pytest.mark.parametrize("template", [CHATML, QWEN, LLAMA])
def test_a_call_that_continues_a_recorded_one_keeps_its_ids(tmp_path: Path, template: str) -> None:
    chat = chat_format(tmp_path, template)
    tree = ConversationTree(chat)
    first, sampled = answered(tree, chat, [ONE])

    second = tree.prompt([ONE, ANSWER, TWO])

    assert first.tokens.tolist() == chat.prompt([ONE])
    assert begins_with(second, first.tokens, sampled.tokens)
    between = chat.extend([ONE, ANSWER], [TWO], sampled=sampled.tokens)
    assert second.tokens.tolist()[len(first.tokens) + len(sampled.tokens) :] == between


def test_sixteen_turns_keep_all_their_ids(chat: ChatFormat) -> None:
    tree = ConversationTree(chat)
    messages: list[Any] = [ONE]
    expected: list[int] = []
    for _ in range(16):
        prompt, sampled = answered(tree, chat, messages)
        assert prompt.tokens.tolist()[: len(expected)] == expected
        expected = [*prompt.tokens.tolist(), *sampled.tokens.tolist()]
        messages = [*messages, ANSWER, TWO]

    assert not tree.branched


def test_a_cut_turn_gets_the_end_that_the_template_writes(chat: ChatFormat) -> None:
    tree = ConversationTree(chat)
    first, sampled = answered(tree, chat, [ONE], end=False)

    second = tree.prompt([ONE, ANSWER, TWO])

    assert begins_with(second, first.tokens, sampled.tokens, [chat.tokenizer.eos_id])


CALL = {"id": "t00000001", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2]}}}
CALLING = {"role": "assistant", "content": "", "reasoning_content": "so", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "3", "tool_call_id": "t00000001"}


@pytest.mark.parametrize(
    "returned",
    [
        CALLING,
        {"tool_calls": [CALL], "role": "assistant", "content": None, "refusal": None, "audio": None},
        CALLING | {"content": [{"type": "text", "text": ""}]},
        CALLING | {"tool_calls": [CALL | {"id": "other"}]},
        *(
            CALLING | {"tool_calls": [CALL | {"function": {"arguments": arguments, "name": "add"}}]}
            for arguments in ('{"a":1,"b":[2]}', '{"b": [2],\n "a": 1}', {"b": [2], "a": 1})
        ),
    ],
)
def test_a_message_that_says_the_same_continues(chat: ChatFormat, returned: dict[str, Any]) -> None:
    tree = ConversationTree(chat)
    first, sampled = tree.prompt([ONE], [TOOL]), completion(chat)
    tree.record(first, CALLING, sampled)

    second = tree.prompt([ONE, returned, RESULT], [TOOL])

    assert second.branch is None
    assert begins_with(second, first.tokens, sampled.tokens)


@pytest.mark.parametrize(
    ("messages", "tools", "reason"),
    [
        ([ONE, ANSWER | {"content": "Yes"}, TWO], (), "edited"),
        ([TWO, ANSWER, ONE], (), "edited"),
        ([ONE, ANSWER, TWO, ANSWER | {"content": "no"}, TWO], (), "edited"),
        ([TWO], (), "compacted"),
        ([ONE, ANSWER, ONE], (), "parallel"),
        ([ONE, ANSWER, TWO], (), "parallel"),
        ([ONE, ANSWER, TWO], [TOOL], "tools"),
        ([ONE], (), "parallel"),
    ],
)
def test_every_branch_has_a_reason(chat: ChatFormat, messages: list[Any], tools: Any, reason: str) -> None:
    tree = ConversationTree(chat)
    answered(tree, chat, [ONE])
    answered(tree, chat, [ONE, ANSWER, TWO])

    answered(tree, chat, messages, tools=tools)

    assert tree.branched == {reason: 1}


def test_a_branch_from_a_recorded_turn_keeps_the_ids_before_it(chat: ChatFormat) -> None:
    tree = ConversationTree(chat)
    first, sampled = answered(tree, chat, [ONE])
    answered(tree, chat, [ONE, ANSWER, TWO])

    fork = tree.prompt([ONE, ANSWER, {"role": "user", "content": "three?"}])

    assert begins_with(fork, first.tokens, sampled.tokens)


def test_what_is_not_recorded_counts_as_no_branch(chat: ChatFormat) -> None:
    tree = ConversationTree(chat)
    answered(tree, chat, [ONE])
    for _ in range(3):
        tree.prompt([ONE, ANSWER, TWO])  # cancelled

    answered(tree, chat, [ONE, ANSWER, TWO])

    assert not tree.branched


THOUGHT = "<think>\nso\n</think>\n\nyes"


@pytest.mark.parametrize(("history", "reason"), [("keep", None), ("template", "template")])
def test_thoughts_that_the_template_drops_stay_or_begin_a_branch(
    chat: ChatFormat, history: Any, reason: str | None
) -> None:
    tree = ConversationTree(replace(chat, history=history))
    first, sampled = tree.prompt([ONE]), completion(chat, THOUGHT)
    tree.record(first, ANSWER | {"reasoning_content": "\nso\n"}, sampled)

    second = tree.prompt([ONE, ANSWER, TWO])

    assert second.branch == reason
    assert begins_with(second, first.tokens, sampled.tokens) == (history == "keep")


def test_a_turn_as_the_template_writes_it_continues_by_the_template_too(chat: ChatFormat) -> None:
    tree = ConversationTree(replace(chat, history="template"))
    first, sampled = answered(tree, chat, [ONE], text="yes")

    second = tree.prompt([ONE, ANSWER, TWO])

    assert second.branch is None
    assert second.tokens.tolist() == chat.prompt([ONE, ANSWER, TWO])
    assert begins_with(second, first.tokens, sampled.tokens)


def test_of_turns_that_say_the_same_the_one_whose_calls_have_these_ids_is_continued(chat: ChatFormat) -> None:
    tree = ConversationTree(chat)
    prompt = tree.prompt([ONE], [TOOL])
    sampled = [completion(chat, text) for text in ("a", "b", "c")]
    ids = ["t00000001", "t00000002", "t00000003"]
    for each, name in zip(sampled, ids, strict=True):
        tree.record(prompt, CALLING | {"tool_calls": [CALL | {"id": name}]}, each)

    for each, name in zip(sampled, ids, strict=True):
        returned = CALLING | {"tool_calls": [CALL | {"id": name}]}
        assert begins_with(tree.prompt([ONE, returned, RESULT], [TOOL]), prompt.tokens, each.tokens)


@pytest.mark.parametrize("messages", [[], [ONE, ANSWER]])
def test_messages_must_end_with_one_that_is_not_of_the_assistant(chat: ChatFormat, messages: list[Any]) -> None:
    with pytest.raises(InvalidData, match="messages: expected the last one to be of the user or of a tool, got"):
        ConversationTree(chat).prompt(messages)


def test_a_message_that_comes_with_every_call_is_read_once(chat: ChatFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[Any] = []
    made = conversation_tree._key

    def watched(message: Any) -> bytes:
        keys.append(message)
        return made(message)

    monkeypatch.setattr(conversation_tree, "_key", watched)
    tree = ConversationTree(chat)
    said = [KnownMessage(ONE)]

    for _ in range(5):
        prompt = tree.prompt(said)
        sampled = completion_of(chat, "yes")
        tree.record(prompt, {"role": "assistant", "content": "yes"}, sampled)
        said = [*said, KnownMessage(ANSWER), KnownMessage(TWO)]

    assert len(keys) == len(said) - 2 + 5
