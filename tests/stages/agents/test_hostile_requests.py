"""Requests that no client sends: changed at every place, each is refused with a sentence, or is a request like others.

The application is called without sockets.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from tests.stages.agents.served import Rollout, chat_format, completion_of

from penstock._stages.agents.agent_client import ContextTooLong
from penstock._stages.agents.endpoint.application import Application, ServedRollouts
from penstock._stages.agents.endpoint.routes import ROUTES
from penstock._stages.agents.endpoint.served_rollout import ServedRollout
from penstock._stages.http.limits import Limits
from penstock.chat import ChatFormat

USER = {"role": "user", "content": "one?"}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": PARAMETERS}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 8, "seed": 3, "stop": ["x"], "n": 2, "logprobs": 1}

REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": [{"type": "text", "text": "one?"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "2"},
        ],
        **(SAMPLING | {"logprobs": True}),
        "tools": [TOOL],
        "tool_choice": "auto",
        "stream_options": {"include_usage": True},
        "metadata": {"a": [1]},
    },
    "/v1/responses": {
        "instructions": "be kind",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "one?"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
        ],
        "tools": [{"type": "function", "name": "add", "parameters": PARAMETERS}],
        "max_output_tokens": 8,
        "text": {"format": {"type": "text"}},
    },
    "/v1/messages": {
        "max_tokens": 8,
        "system": [{"type": "text", "text": "be kind"}],
        "messages": [
            {"role": "user", "content": "one?"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "2"}]},
        ],
        "tools": [{"name": "add", "input_schema": PARAMETERS}],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["x"],
    },
    "/v1/messages/count_tokens": {"messages": [USER], "tools": [{"name": "add", "input_schema": PARAMETERS}]},
    "/v1/completions": {"prompt": ["once"], **SAMPLING, "logprobs": 0, "stop_token_ids": [9]},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": SAMPLING, "request_id": "mine"},
    "/tokenize": {"messages": [USER], "tools": [TOOL], "add_generation_prompt": True},
    "/v1/reward": {"value": 1.0, "call": "call-0"},
}

DEEP: Any = json.loads("[" * 500 + "]" * 500)

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 10**30, -(2**63) - 1, 1e308, "", "x", "\x00", "\U0010ffff", "<|im_end|>"),
    *(
        [],
        [None],
        [[]],
        {},
        {"": None},
        {"type": "text"},
        {"role": "robot", "content": "x"},
        DEEP,
        "x" * 3000,
        [1] * 3000,
    ),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value within `value`."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from places(child, (*path, key))


def changed(request: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """Return `request` with another value at a place; without a value, if that is `...`."""
    made: Any = copy.deepcopy(request)
    *before, last = path
    holder = made
    for key in before:
        holder = holder[key]
    if value is ...:
        del holder[last]
    else:
        holder[last] = value
    return dict(made)


def texts(request: dict[str, Any], made: random.Random) -> Iterator[bytes]:
    """Yield requests that are no JSON, or have what no encoder writes."""
    whole = msgspec.json.encode(request)
    yield from (b"", b"null", b"[]", b'""', b"1e999", b"[" * 100_000, b'{"a":' * 100_000, whole + b"x", whole[:-1])
    name = msgspec.json.encode(next(iter(request)))
    yield b"{" + name + b": 1, " + whole[1:]  # twice
    yield whole[:-1] + b", " + name + b": 1}"
    for junk in (b"\xff", b"\xed\xa0\x80", rb"\ud800", rb"\ud800\u0041", b"\x00", b"NaN", b"9" * 5000, b"-", rb"\u12"):
        for _ in range(4):
            place = made.randrange(1, len(whole))
            yield whole[:place] + junk + whole[place:]
            yield whole[:place] + junk + whole[place + len(junk) :]
    for _ in range(8):
        yield whole[: made.randrange(len(whole))]


def bodies(path: str, share: float) -> Iterator[bytes]:
    """Yield changed requests of a route: a share of all with one other value, and all others."""
    request, made = REQUESTS[path], random.Random(path)  # noqa: S311 (no secret)
    for place in places(request):
        yield msgspec.json.encode(changed(request, place, ...))
        for value in VALUES:
            if made.random() < share:
                yield msgspec.json.encode(changed(request, place, value))
    for name in ("unknown", "images", "previous_response_id", "__class__", "messages ", ""):
        yield msgspec.json.encode({**request, name: 1})
    yield from texts(request, made)


async def answer(app: Application, path: str, body: bytes) -> tuple[int, bytes]:
    """Return the status and the content that a request is answered with."""
    came: list[Any] = []

    async def receive() -> Any:
        if not came_in:
            came_in.append(True)
            return {"type": "http.request", "body": body, "more_body": False}
        return await anyio.sleep_forever()

    async def send(message: Any) -> None:
        came.append(message)

    came_in: list[bool] = []
    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
    await app(scope, receive, send)
    return came[0]["status"], b"".join(each.get("body", b"") for each in came)


@pytest.fixture
def chat(tmp_path: Path) -> ChatFormat:
    return chat_format(tmp_path)


@pytest.mark.parametrize("share", [0.03, pytest.param(1.0, marks=pytest.mark.long)])
@pytest.mark.parametrize("path", REQUESTS)
async def test_a_request_that_is_changed_anywhere_is_answered_or_refused_with_a_sentence(
    path: str, share: float, chat: ChatFormat
) -> None:
    async def sample(prompt: Any, _: object) -> Any:
        if len(prompt) > 2000:
            raise ContextTooLong("the prompt is too long")
        return completion_of(chat, "yes")

    rollouts, rollout = ServedRollouts(), Rollout(sample)
    served = ServedRollout(rollout, chat, url="")
    rollouts.add(served)
    app = Application(ROUTES, rollouts, Limits())
    statuses = set()
    for body in bodies(path, share):
        with anyio.fail_after(60):
            status, content = await answer(app, f"/r/{served.key}{path}", body)
        statuses.add(status)
        assert status in (200, 400), (status, body[:500], content[:500])
        if status == 400:
            message = msgspec.json.decode(content)["error"]["message"]
            assert "\n" not in message
            assert 10 < len(message) <= 500, message[:1000]

    assert statuses == {200, 400}
