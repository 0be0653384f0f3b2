"""/v1/responses over HTTP: OpenAI's Responses, of which each request has the whole conversation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.models_hf.chat_templates import QWEN
from tests.stages.agents.served import Rollout, chat_format, completion_of, engine_of, of_engine, of_script, serving

from penstock.chat import ChatFormat

PATH = "/responses"
ASK: dict[str, Any] = {"role": "user", "content": "one?"}
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True, "description": None}
CALLING = '<think>hm</think>so:\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture
def chat(tmp_path: Path) -> ChatFormat:
    return chat_format(tmp_path)


def exact(rollout: Rollout) -> bool:
    """Return whether each call begins with the prompt and the tokens of the one before it."""
    pairs = zip(rollout.calls, rollout.calls[1:], strict=False)
    kept = [([*before.tolist(), *call.tokens.tolist()], after.tolist()) for (before, call), (after, _) in pairs]
    return all(after[: len(before)] == before for before, after in kept)


async def test_a_conversation_of_several_turns_keeps_every_sampled_id(chat: ChatFormat) -> None:
    async with engine_of(chat) as engine:
        rollout = of_engine(engine)
        async with serving(chat, rollout) as client:
            items: list[Any] = [ASK]
            for _ in range(4):
                status, answer = await client.post(PATH, {"input": items, "instructions": "short", "store": False})
                assert status == 200
                items = [*items, *answer["output"], ASK]

    assert exact(rollout)
    assert not client.served.branched


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thoughts", ["returned", "dropped"])
async def test_calls_of_functions_and_thoughts_are_items_and_their_outputs_continue(
    chat: ChatFormat, thoughts: str, *, stream: bool
) -> None:
    rollout = of_script(chat, CALLING, "done")
    async with serving(chat, rollout) as client:
        _, answer = await client.post(PATH, {"input": "one?", "tools": [TOOL], "stream": stream})
        whole = answer[-1]["response"] if stream else answer
        reasoning, said, call = whole["output"]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
        returned = [said, call, output] if thoughts == "dropped" else [reasoning, said, call, output]
        _, last = await client.post(PATH, {"input": [ASK, *returned], "tools": [TOOL]})

    assert (reasoning["type"], reasoning["content"][0]["text"]) == ("reasoning", "hm")
    assert said["content"][0]["text"] == "so:"
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "add", '{"a":1}')
    assert exact(rollout)
    assert not client.served.branched
    assert (last["status"], last["output"][0]["content"][0]["text"]) == ("completed", "done")
    assert last["usage"]["total_tokens"] == last["usage"]["input_tokens"] + last["usage"]["output_tokens"]


@pytest.fixture
def chat_with_thoughts(tmp_path: Path) -> ChatFormat:
    return chat_format(tmp_path, QWEN.replace("n' + content", "n' + (message.reasoning_content or '') + content"))


async def test_thoughts_are_returned_in_the_form_that_the_client_sends_back_unread(
    chat_with_thoughts: ChatFormat,
) -> None:
    chat = chat_with_thoughts
    rollout = of_script(chat, CALLING, "done")
    async with serving(chat, rollout) as client:
        fields = {"tools": [TOOL], "store": False, "include": ["reasoning.encrypted_content"]}
        _, answer = await client.post(PATH, {"input": [ASK], **fields})
        reasoning, said, call = answer["output"]
        unread = {name: value for name, value in reasoning.items() if name != "content"}
        edited = [{"role": "user", "content": "two?"}, unread, said, call]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
        await client.post(PATH, {"input": [*edited, output], **fields})

    assert reasoning["encrypted_content"] == "hm"
    assert "assistant\nhmso:" in chat.tokenizer.decode(rollout.asked[1][0].tolist())


async def test_a_stream_has_the_events_of_a_response_in_order(chat: ChatFormat) -> None:
    async with serving(chat, of_script(chat, "yes")) as client:
        _, events = await client.post(PATH, {"input": "one?", "stream": True})

    assert [each["type"].removeprefix("response.") for each in events] == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    assert events[4]["delta"] == "yes"


async def test_the_arguments_of_a_call_are_streamed(chat: ChatFormat) -> None:
    async with serving(chat, of_script(chat, CALLING)) as client:
        _, events = await client.post(PATH, {"input": "one?", "stream": True, "tools": [TOOL]})

    deltas = [each["delta"] for each in events if each["type"] == "response.function_call_arguments.delta"]
    assert deltas == ['{"a":1}']


async def test_fields_become_parameters_of_the_call_and_a_cut_turn_is_incomplete(chat: ChatFormat) -> None:
    async def sample(*_: object) -> Any:
        return completion_of(chat, "cut", end=False)

    rollout = Rollout(sample)
    async with serving(chat, rollout) as client:
        body = {"input": "one?", "max_output_tokens": 3, "temperature": 0, "top_p": 0.5, "reasoning": {"effort": None}}
        _, answer = await client.post(PATH, body | {"text": {"format": {"type": "text"}}, "truncation": "disabled"})

    ((_, sampling),) = rollout.asked
    assert (sampling.max_completion_tokens, sampling.greedy, sampling.top_p) == (3, True, 0.5)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


REFUSED: dict[str, list[Any]] = {
    "store": [True],
    "previous_response_id": ["resp_1"],
    "conversation": ["conv_1"],
    "background": [True],
    "truncation": ["auto"],
    "text": [{"format": {"type": "json_schema"}}],
    "reasoning": [{"effort": "high"}],
    "include": [["message.output_text.logprobs"]],
    "tool_choice": ["required", {"type": "function", "name": "add"}],
    "tools": [[{"type": "web_search"}], [{"type": "function"}], {}],
    "parallel_tool_calls": [False],
    "top_logprobs": [5],
    "max_output_tokens": [0, "1"],
    "temperature": [-1],
    "input": [
        *([], 1, None, [1], [{}], [{"type": "item_reference", "id": "x"}], [{"type": "function_call", "name": "x"}]),
        [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
        [{"type": "function_call_output", "output": "x"}],
        [ASK, {"role": "assistant", "content": "the end"}],
    ],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in REFUSED for value in REFUSED[field]])
async def test_what_it_cannot_do_is_400_with_the_name_of_the_field(chat: ChatFormat, field: str, value: Any) -> None:
    rollout = of_script(chat)
    async with serving(chat, rollout) as client:
        status, error = await client.refused(PATH, {"input": [ASK]} | {field: value})

    assert (status, len(rollout.asked)) == (400, 0)
    assert (field if value != REFUSED["input"][-1] else "messages") in f"{error['param']} {error['message']}"
