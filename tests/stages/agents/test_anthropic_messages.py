"""/v1/messages over HTTP, as Anthropic has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.stages.agents.served import chat_format, completion_of, engine_of, of_engine, of_script, serving

from penstock._stages.agents.agent_client import CallsUsedUp, ContextTooLong
from penstock.chat import ChatFormat

PATH = "/messages"
ASK: list[dict[str, Any]] = [{"role": "user", "content": "one?"}]
TOOL = {"name": "add", "description": "adds", "input_schema": {"type": "object"}}
CALLING = '<think>hm</think>so:\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture
def chat(tmp_path: Path) -> ChatFormat:
    return chat_format(tmp_path)


def asking(messages: list[Any], **fields: Any) -> dict[str, Any]:
    return {"model": "claude", "max_tokens": 9, "messages": messages, **fields}


def assembled(events: list[Any]) -> list[dict[str, Any]]:
    """Return the content that a client assembles of a stream."""
    blocks: list[dict[str, Any]] = []
    for each in events:
        match each:
            case {"type": "content_block_start", "content_block": block}:
                blocks.append(dict(block))
            case {"type": "content_block_delta", "index": index, "delta": {"partial_json": text}}:
                blocks[index]["input"] = msgspec.json.decode(str(text))
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                name = delta["type"].removesuffix("_delta")
                blocks[index][name] += delta[name]
    return blocks


async def test_a_conversation_of_several_turns_keeps_every_sampled_id(chat: ChatFormat) -> None:
    async with engine_of(chat) as engine:
        rollout = of_engine(engine)
        async with serving(chat, rollout) as client:
            messages, answer = ASK, None
            for _ in range(4):
                status, answer = await client.post(PATH, asking(messages, system="be short"))
                assert status == 200
                messages = [*messages, {"role": "assistant", "content": answer["content"]}, *ASK]

    for (before, call), (after, _) in zip(rollout.calls, rollout.calls[1:], strict=False):
        kept = [*before.tolist(), *call.tokens.tolist()]
        assert after.tolist()[: len(kept)] == kept
    assert answer is not None
    assert answer["usage"] == {
        "input_tokens": len(rollout.calls[3][0]),
        "output_tokens": len(rollout.calls[3][1].tokens),
    }
    assert not client.served.branched


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_of_tools_and_thoughts_are_blocks_and_their_results_continue(
    chat: ChatFormat, *, stream: bool
) -> None:
    rollout = of_script(chat, CALLING, "done")
    async with serving(chat, rollout) as client:
        _, answer = await client.post(PATH, asking(ASK, tools=[TOOL], stream=stream))
        content = assembled(answer) if stream else answer["content"]
        result = {"type": "tool_result", "tool_use_id": content[2]["id"], "content": [{"type": "text", "text": "2"}]}
        dumped = [*content[:2], content[2] | {"toolset_name": None, "caller": None}]  # as the client's types are
        returned = [{"role": "assistant", "content": dumped}, {"role": "user", "content": [result]}]
        _, last = await client.post(PATH, asking([*ASK, *returned], tools=[TOOL]))

    assert content[0] == {"type": "thinking", "thinking": "hm", "signature": ""}
    assert content[1] == {"type": "text", "text": "so:"}
    assert (content[2]["name"], content[2]["input"]) == ("add", {"a": 1})
    assert (answer[-2]["delta"] if stream else answer)["stop_reason"] == "tool_use"
    (before, call), (after, _) = rollout.calls
    kept = [*before.tolist(), *call.tokens.tolist()]
    assert after.tolist()[: len(kept)] == kept
    assert (last["content"], last["stop_reason"]) == ([{"type": "text", "text": "done"}], "end_turn")


async def test_arguments_that_are_null_are_arguments(chat: ChatFormat) -> None:
    rollout = of_script(chat, CALLING.replace("1", "null"), "done")
    async with serving(chat, rollout) as client:
        _, answer = await client.post(PATH, asking(ASK, tools=[TOOL]))
        result = {"type": "tool_result", "tool_use_id": answer["content"][2]["id"], "content": "2"}
        returned = [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
        await client.post(PATH, asking([*ASK, *returned], tools=[TOOL]))

    assert answer["content"][2]["input"] == {"a": None}
    assert not client.served.branched


async def test_a_stream_has_the_events_of_a_message_in_order(chat: ChatFormat) -> None:
    async with serving(chat, of_script(chat, "yes")) as client:
        _, events = await client.post(PATH, asking(ASK, stream=True))

    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [each["type"] for each in events] == ["message_start", *block, "message_delta", "message_stop"]
    assert events[0]["message"]["usage"] == {"input_tokens": len(chat.prompt(ASK)), "output_tokens": 0}
    assert events[-2]["usage"] == {"output_tokens": 4}


async def test_fields_become_parameters_of_the_call(chat: ChatFormat) -> None:
    rollout = of_script(chat, "yes or no")
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop_sequences": [" or"], "metadata": {"user_id": "u"}}
    async with serving(chat, rollout) as client:
        _, answer = await client.post(PATH, asking(ASK, **fields))

    ((_, sampling),) = rollout.asked
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 5)
    assert (sampling.stop, sampling.max_completion_tokens) == ((" or",), 9)
    assert answer["content"] == [{"type": "text", "text": "yes"}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", " or")


async def test_a_cut_turn_says_so(chat: ChatFormat) -> None:
    rollout = of_script(chat)

    async def sample(*_: object) -> Any:
        return completion_of(chat, "cut", end=False)

    rollout.sample = sample
    async with serving(chat, rollout) as client:
        assert (await client.post(PATH, asking(ASK)))[1]["stop_reason"] == "max_tokens"


async def test_used_up_calls_end_the_agent(chat: ChatFormat) -> None:
    async with serving(chat, of_script(chat, CallsUsedUp("no more"))) as client:
        assert (await client.post(PATH, asking(ASK, tools=[TOOL])))[1]["stop_reason"] == "end_turn"


async def test_the_tokens_of_a_conversation_are_counted(chat: ChatFormat) -> None:
    rollout = of_script(chat, "yes")
    async with serving(chat, rollout) as client:
        body: dict[str, Any] = {
            "model": "claude",
            "messages": ASK,
            "system": [{"type": "text", "text": "short"}],
            "tools": [TOOL],
        }
        _, counted = await client.post("/messages/count_tokens", body)
        await client.post(PATH, body | {"max_tokens": 9})

    assert counted == {"input_tokens": len(rollout.asked[0][0])}


async def test_errors_have_the_form_of_the_provider(chat: ChatFormat) -> None:
    async with serving(chat, of_script(chat, ContextTooLong("too long"))) as client:
        status, answer = await client.post(PATH, asking(ASK))
        denied, other = await client.post(PATH, asking(ASK), url=f"{client.endpoint.url}/v1")

    assert (status, denied) == (400, 401)
    assert answer["type"] == other["type"] == "error"
    assert (answer["error"]["type"], answer["error"]["code"]) == ("invalid_request_error", "context_length_exceeded")
    assert other["error"]["type"] == "authentication_error"


async def test_a_thread_that_the_server_would_hold_is_refused_by_the_code_on_which_its_client_goes_on(
    chat: ChatFormat,
) -> None:
    async with serving(chat, of_script(chat)) as client:
        status, error = await client.refused(PATH, asking(ASK, thread={"type": "create"}))

    assert (status, error["details"]) == (400, {"error_code": "thread_unsupported_request"})


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
REFUSED: dict[str, list[Any]] = {
    "max_tokens": [None, 0, "9"],
    "tool_choice": [
        {"type": "any"},
        {"type": "tool", "name": "add"},
        {"type": "auto", "disable_parallel_tool_use": True},
    ],
    "thinking": [{"type": "enabled", "budget_tokens": 1024}],
    "tools": [[{"type": "web_search_20250305", "name": "web_search"}], [{"name": "x"}]],
    "stop_sequences": ["x", [""], [1]],
    "temperature": [-1, "x"],
    "system": [1, [IMAGE]],
    "mcp_servers": [[]],
    "container": ["x"],
    "messages": [
        *([], "x", [{}], [{"role": "system", "content": "x"}], [{"role": "user"}]),
        [{"role": "user", "content": [IMAGE]}],
        [{"role": "user", "content": [{"type": "tool_use", "id": "x", "name": "x", "input": {}}]}],
        [{"role": "assistant", "content": "the end"}],
        [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]}, *ASK],
    ],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in REFUSED for value in REFUSED[field]])
async def test_what_it_cannot_do_is_400_with_the_name_of_the_field(chat: ChatFormat, field: str, value: Any) -> None:
    rollout = of_script(chat)
    async with serving(chat, rollout) as client:
        status, error = await client.refused(PATH, asking(ASK) | {field: value})

    assert (status, len(rollout.asked)) == (400, 0)
    assert field.removesuffix("_sequences") in error["message"]
