"""/v1/chat/completions over HTTP: what agents see, what is sampled for it, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import msgspec
import pytest
from tests.fake_policy import FakePolicy
from tests.loop_clock import LoopClock
from tests.stages.agents.served import (
    Rollout,
    chat_format,
    completion_of,
    engine_of,
    of_engine,
    of_script,
    serving,
)

from penstock import SourceEnv
from penstock._stages.agents.agent_client import AgentClient, CallsUsedUp, ContextTooLong, RolloutDeadline, RolloutEnded
from penstock._stages.agents.endpoint import served_rollout
from penstock._stages.agents.endpoint.application import COMMENT_S
from penstock.chat import ChatFormat
from penstock.policies import Engine, PretrainedTokenizer
from penstock.testing import drive_source

ASK: list[dict[str, Any]] = [{"role": "user", "content": "one?"}]
MORE: dict[str, Any] = {"role": "user", "content": "more"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALLING = 'so:\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
PATH = "/chat/completions"


@pytest.fixture
def chat(tmp_path: Path) -> ChatFormat:
    return chat_format(tmp_path)


@pytest.fixture
async def engine(chat: ChatFormat) -> AsyncGenerator[Engine]:
    async with engine_of(chat) as engine:
        yield engine


def exact(rollout: Rollout, index: int, earlier: int) -> bool:
    """Return whether the prompt of a call begins with the prompt and the tokens of an earlier one."""
    (prompt, _), (before, call) = rollout.calls[index], rollout.calls[earlier]
    kept = [*before.tolist(), *call.tokens.tolist()]
    return bool(prompt.tolist()[: len(kept)] == kept)


# -- tokens ------------------------------------------------------------------------------------------------------------


async def test_a_conversation_of_several_turns_keeps_every_sampled_id(chat: ChatFormat, engine: Engine) -> None:
    rollout = of_engine(engine)
    async with serving(chat, rollout) as client:
        messages = ASK
        for _ in range(5):
            answer = await client.chat(messages, return_token_ids=True)
            prompt, call = rollout.calls[-1]
            assert answer["prompt_token_ids"] == prompt.tolist()
            assert answer["choices"][0]["token_ids"] == call.tokens.tolist()
            messages = [*messages, answer["choices"][0]["message"], MORE]

    assert all(exact(rollout, index, index - 1) for index in range(1, 5))
    assert not client.served.branched


async def test_a_stream_says_what_the_whole_answer_would(chat: ChatFormat, engine: Engine) -> None:
    rollouts = [of_engine(engine) for _ in range(2)]
    async with serving(chat, rollouts[0]) as client:
        whole = await client.chat(ASK, seed=7)
    async with serving(chat, rollouts[1]) as client:
        events = await client.chat(ASK, seed=7, stream=True, stream_options={"include_usage": True})
        said = "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-2])
        message = {"role": "assistant", "content": said}
        await client.chat([*ASK, message, MORE])

    assert said == whole["choices"][0]["message"]["content"]
    assert events[-3]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert (events[-2]["usage"], events[-1]) == (whole["usage"], "[DONE]")
    assert {event["id"] for event in events[:-1]} == {whole["id"]}
    assert exact(rollouts[1], 1, 0)


async def test_every_one_of_n_choices_can_be_continued(chat: ChatFormat, engine: Engine) -> None:
    rollout = of_engine(engine)
    async with serving(chat, rollout) as client:
        answer = await client.chat(ASK, n=3, seed=1, return_token_ids=True)
        for choice in answer["choices"]:
            await client.chat([*ASK, choice["message"], MORE])

    sampled = [call.tokens.tolist() for _, call in rollout.calls]
    assert sorted(choice["token_ids"] for choice in answer["choices"]) == sorted(sampled[:3])
    assert len({str(tokens) for tokens in sampled[:3]}) == 3
    assert all(any(exact(rollout, index, earlier) for earlier in range(3)) for index in range(3, 6))
    assert answer["usage"]["completion_tokens"] == sum(map(len, sampled[:3]))


async def test_every_one_of_n_choices_names_its_call_for_a_reward(chat: ChatFormat) -> None:
    rollout = of_script(chat, *"abcdef")
    async with serving(chat, rollout) as client:
        answers = [await client.chat(ASK, n=3), (await client.post("/completions", {"prompt": "x", "n": 3}))[1]]
        for answer in answers:
            for choice in answer["choices"]:
                said = choice["text"] if "text" in choice else choice["message"]["content"]
                await client.post("/reward", {"value": ord(said), "call": choice["call_id"]})

    named = {call.id: chat.tokenizer.decode(call.tokens[:-1].tolist()) for _, call in rollout.calls}
    assert rollout.rewards == [(ord(named[call or ""]), call) for _, call in rollout.rewards]
    assert len(named) == 6
    assert [answer["id"] for answer in answers] == [answer["choices"][0]["call_id"] for answer in answers]


async def test_forks_and_parallel_calls_keep_the_ids_before_them(chat: ChatFormat, engine: Engine) -> None:
    rollout = of_engine(engine)
    async with serving(chat, rollout) as client:
        answer = await client.chat(ASK)
        before = [*ASK, answer["choices"][0]["message"]]
        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(client.chat, [*before, {"role": "user", "content": f"fork {number}"}])
        await client.chat([{"role": "user", "content": "edited"}, *before[1:], MORE])
        await client.chat([{"role": "user", "content": "compacted"}])

    assert all(exact(rollout, index, 0) for index in range(1, 9))
    assert client.served.branched == {"parallel": 7, "edited": 1, "compacted": 1}


async def test_calls_of_tools_continue_in_whatever_form_the_client_returns_them(chat: ChatFormat) -> None:
    rollout = of_script(chat, "<think>hm</think>" + CALLING, "done")
    async with serving(chat, rollout) as client:
        (choice,) = (await client.chat(ASK, tools=[TOOL]))["choices"]
        call = choice["message"]["tool_calls"][0]
        function = {"name": "add", "arguments": '{ "a" :1}', "parsed_arguments": {"a": 1}}
        returned = {"role": "assistant", "tool_calls": [call | {"function": function}], "parsed": None}
        returned["content"] = choice["message"]["content"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
        last = await client.chat([*ASK, returned, result], tools=[TOOL])

    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "hm"
    assert (call["type"], call["function"]) == ("function", {"name": "add", "arguments": '{"a":1}'})
    assert exact(rollout, 1, 0)
    assert last["choices"][0]["message"] == {"role": "assistant", "content": "done"}


async def test_calls_of_tools_are_streamed(chat: ChatFormat) -> None:
    async with serving(chat, of_script(chat, CALLING)) as client:
        events = await client.chat(ASK, tools=[TOOL], stream=True)

    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    (call,) = next(delta["tool_calls"] for delta in deltas if "tool_calls" in delta)
    assert (call["index"], call["function"]) == (0, {"name": "add", "arguments": '{"a":1}'})
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"


async def test_without_tools_or_by_tool_choice_none_a_call_is_text(chat: ChatFormat) -> None:
    async with serving(chat, of_script(chat, CALLING, CALLING)) as client:
        for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
            (choice,) = (await client.chat(ASK, **fields))["choices"]
            assert (choice["message"]["content"], choice["finish_reason"]) == (CALLING, "stop")


async def test_a_malformed_call_is_text_and_counted(chat: ChatFormat) -> None:
    malformed = "<tool_call>\n{no}\n</tool_call>"
    async with serving(chat, of_script(chat, malformed)) as client:
        (choice,) = (await client.chat(ASK, tools=[TOOL]))["choices"]

    assert choice["message"]["content"] == malformed
    assert client.served.malformed_calls == 1


# -- fields ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0}, {"greedy": True}),
        ({"temperature": 0.5, "top_p": 0.9}, {"temperature": 0.5, "top_p": 0.9}),
        ({"max_tokens": 3}, {"max_completion_tokens": 3}),
        ({"max_tokens": 3, "max_completion_tokens": 4}, {"max_completion_tokens": 4}),
        ({"seed": 5}, {"seed": 5}),
        ({"stop": "x"}, {"stop": ("x",)}),
        ({"stop": ["x", "yz"], "top_k": 3, "min_p": 0.1}, {"stop": ("x", "yz"), "top_k": 3, "min_p": 0.1}),
        ({"stop_token_ids": [9], "repetition_penalty": 1.1}, {"stop_ids": (9,), "repetition_penalty": 1.1}),
    ],
)
async def test_fields_become_parameters_of_the_call(
    chat: ChatFormat, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    rollout = of_script(chat, "yes")
    async with serving(chat, rollout) as client:
        await client.chat(ASK, **fields)

    assert rollout.asked[0][1] == msgspec.structs.replace(rollout.sampling, **expected)


async def test_a_stop_string_ends_the_message_and_not_the_record(chat: ChatFormat) -> None:
    rollout = of_script(chat, "yes or no", "more")
    async with serving(chat, rollout) as client:
        (choice,) = (await client.chat(ASK, stop=["no", " or"]))["choices"]
        await client.chat([*ASK, choice["message"], MORE])

    assert (choice["message"]["content"], choice["stop_reason"]) == ("yes", " or")
    assert exact(rollout, 1, 0)


async def test_a_cut_turn_says_so(chat: ChatFormat) -> None:
    async def sample(*_: object) -> Any:
        return completion_of(chat, "cut", end=False)

    async with serving(chat, Rollout(sample)) as client:
        assert (await client.chat(ASK))["choices"][0]["finish_reason"] == "length"


async def test_logprobs_are_those_of_the_sampled_tokens(chat: ChatFormat, engine: Engine) -> None:
    rollout = of_engine(engine)
    async with serving(chat, rollout) as client:
        (choice,) = (await client.chat(ASK, logprobs=True, top_logprobs=0))["choices"]

    ((_, call),) = rollout.calls
    assert call.logprobs is not None
    content = choice["logprobs"]["content"]
    assert [each["logprob"] for each in content] == pytest.approx(call.logprobs.tolist(), abs=1e-6)
    assert [each["token"] for each in content] == [chat.tokenizer.decode([t]) for t in call.tokens.tolist()]


async def test_fields_that_are_the_client_s_own_business_are_ignored(chat: ChatFormat) -> None:
    own = {"user": "u", "metadata": {"a": [1]}, "service_tier": "auto", "model": "gpt", "prompt_cache_key": "k"}
    neutral = {"presence_penalty": 0, "logit_bias": {}, "store": False, "response_format": {"type": "text"}}
    async with serving(chat, of_script(chat, "yes")) as client:
        answer = await client.chat(ASK, **own, **neutral, parallel_tool_calls=True, tool_choice="auto")

    assert answer["model"] == "gpt"


REFUSED: dict[str, list[Any]] = {
    "presence_penalty": [0.5, "x"],
    "frequency_penalty": [-1],
    "logit_bias": [{"5": 1}],
    "top_logprobs": [1],
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {}}],
    "tool_choice": ["required", {"type": "function", "function": {"name": "add"}}],
    "parallel_tool_calls": [False],
    "modalities": [["audio"]],
    "store": [True],
    "n": [0, 65, "1", 10**30],
    "temperature": [-1, "hot", True],
    "top_p": [0, 2],
    "max_tokens": [0, -1, 1.5, 10**20, "9"],
    "max_completion_tokens": [0],
    "seed": [2**64, "s"],
    "stop": [[""], [1], 5, {}, ["x"] * 65],
    "stream": ["yes", 1],
    "stream_options": [[], {"unknown": 1}],
    "tools": [{}, [{"type": "web_search"}], [{"type": "function"}], [{"type": "function", "function": {"name": 1}}]],
    "logprobs": [1],
    "messages": [
        *([], {}, "hello", [1], [{}], [{"role": "robot"}], [{"role": 1, "content": ""}]),
        [{"role": "user", "content": 1}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "input_audio", "text": ""}]}],
        [{"role": "user", "content": "x", "audio": {"id": "a"}}],
        [{"role": "assistant", "content": "the end"}],
        [{"role": "assistant", "tool_calls": [{"function": {}}]}, *ASK],
    ],
    "reasoning_effort": ["low"],
    "functions": [[]],
    "prediction": [{}],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in REFUSED for value in REFUSED[field]])
async def test_what_it_cannot_do_is_400_with_the_name_of_the_field(chat: ChatFormat, field: str, value: Any) -> None:
    rollout = of_script(chat)
    async with serving(chat, rollout) as client:
        status, error = await client.refused(PATH, {"messages": ASK, field: value})

    assert status == 400
    assert field in f"{error['param']} {error['message']}"
    assert error["type"] == "invalid_request_error"
    assert not rollout.asked


# -- keys --------------------------------------------------------------------------------------------------------------


async def test_a_key_is_in_the_path_or_in_either_header(chat: ChatFormat) -> None:
    body = {"messages": ASK}
    async with serving(chat, of_script(chat, *["yes"] * 3)) as client:
        key = client.served.key
        headers: list[dict[str, str]] = [{"Authorization": f"Bearer {key}"}, {"X-Api-Key": key}]
        plain = f"{client.endpoint.url}/v1"
        statuses = [(await client.post(PATH, body, headers=each, url=plain))[0] for each in headers]
        assert [*statuses, (await client.post(PATH, body))[0]] == [200, 200, 200]

        for wrong in ({}, {"Authorization": "Bearer other"}, {"Authorization": key}, {"X-Api-Key": ""}):
            status, error = await client.refused(PATH, body, headers=wrong, url=plain)
            assert (status, error["type"], error["code"]) == (401, "authentication_error", "invalid_api_key")
        assert (await client.refused(PATH, body, url=f"{client.endpoint.url}/r/other/v1"))[0] == 401


async def test_the_rollouts_of_two_keys_are_apart(chat: ChatFormat) -> None:
    first, second = of_script(chat, "1", "1"), of_script(chat, "2")
    async with serving(chat, first) as client:
        with client.endpoint.serve(second) as other:
            said = [
                (await client.post(PATH, {"messages": ASK}, url=url))[1]["choices"][0]["message"]["content"]
                for url in (client.served.base_url, other.base_url, client.served.base_url)
            ]

        assert said == ["1", "2", "1"]
        assert (await client.refused(PATH, {"messages": ASK}, url=other.base_url))[1]["code"] == "rollout_ended"


async def test_a_path_that_is_not_served_is_404_and_another_method_405(chat: ChatFormat) -> None:
    async with serving(chat, of_script(chat)) as client:
        assert (await client.refused("/embeddings", {}))[0] == 404
        async with client.session.get(client.served.base_url + PATH) as came:
            assert came.status == 405


async def test_a_unix_socket_is_served_and_removed(chat: ChatFormat, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    async with (
        serving(chat, of_script(chat, "yes"), unix_socket=path) as client,
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as session,
    ):
        by_socket = replace(client, session=session)
        assert (await by_socket.chat(ASK))["choices"][0]["message"]["content"] == "yes"

    assert not path.exists()


# -- the rollout, and its engine ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raised", "status", "code"),
    [
        (ContextTooLong("too long"), 400, "context_length_exceeded"),
        (RolloutDeadline("late"), 408, "rollout_deadline"),
        (RolloutEnded("ended"), 409, "rollout_ended"),
    ],
)
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 2}])
async def test_a_call_that_is_not_sampled_says_why(
    chat: ChatFormat, raised: Exception, status: int, code: str, fields: dict[str, Any]
) -> None:
    async with serving(chat, of_script(chat, raised, raised)) as client:
        came, error = await client.refused(PATH, {"messages": ASK, **fields})

    assert (came, error["code"]) == (status, code)
    assert error["message"].endswith(str(raised))


async def test_used_up_calls_end_the_agent_by_a_message_without_calls(chat: ChatFormat) -> None:
    async with serving(chat, of_script(chat, CallsUsedUp("no more"))) as client:
        (choice,) = (await client.chat(ASK, tools=[TOOL]))["choices"]

    assert (choice["finish_reason"], "tool_calls" in choice["message"]) == ("stop", False)
    assert not client.served.branched


async def test_a_failed_engine_asks_one_client_of_a_rollout_for_one_repetition(chat: ChatFormat) -> None:
    answers = []
    failing = of_script(chat, OSError("gone"), OSError("gone"))
    async with serving(chat, failing) as client:
        with client.endpoint.serve(failing, client.served.shared) as other:
            for served in (client.served, other):
                came = await client.session.post(served.base_url + PATH, json={"messages": ASK})
                answers.append((came.status, came.headers.get("Retry-After"), came.headers.get("x-should-retry")))

    assert answers == [(503, "1", None), (503, None, "false")]


class Waiting:
    """A policy that answers when it is told to."""

    def __init__(self, chat: ChatFormat) -> None:
        self.chat = chat
        self.begun = anyio.Event()
        self.go = anyio.Event()
        self.cancelled = anyio.Event()

    async def __call__(self, *_: object) -> Any:
        self.begun.set()
        try:
            await self.go.wait()
        except anyio.get_cancelled_exc_class():
            self.cancelled.set()
            raise
        return completion_of(self.chat, "yes")


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 3}])
async def test_a_client_that_hangs_up_cancels_its_call(chat: ChatFormat, fields: dict[str, Any]) -> None:
    policy = Waiting(chat)
    async with serving(chat, Rollout(policy)) as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.post, PATH, {"messages": ASK, **fields})
            await policy.begun.wait()
            tasks.cancel_scope.cancel()
        await policy.cancelled.wait()

        policy.go.set()
        await client.chat(ASK)
    assert not client.served.branched


async def test_a_stream_that_waits_has_comments(chat: ChatFormat) -> None:
    policy = Waiting(chat)
    async with serving(chat, Rollout(policy)) as client:
        clock = LoopClock()
        body = {"messages": ASK, "stream": True}
        came: list[aiohttp.ClientResponse] = []
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                came.append(await client.session.post(client.served.base_url + PATH, json=body))

            tasks.start_soon(ask)
            await policy.begun.wait()
            await clock.set_forward_until(lambda: bool(came), COMMENT_S)
            policy.go.set()
        text = await came[0].text()

    assert text.startswith(": waiting\n\n")
    assert text.endswith("data: [DONE]\n\n")


async def test_an_error_within_a_stream_is_an_event(chat: ChatFormat) -> None:
    begun, failing = anyio.Event(), anyio.Event()

    async def sample(*_: Any) -> Any:
        begun.set()
        await failing.wait()
        raise RolloutDeadline("late")

    async with serving(chat, Rollout(sample)) as client:
        clock = LoopClock()
        events: list[Any] = []
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                events.extend((await client.post(PATH, {"messages": ASK, "stream": True}))[1])

            tasks.start_soon(ask)
            await begun.wait()
            tasks.start_soon(clock.set_forward_until, failing.is_set, COMMENT_S)
            await anyio.sleep(COMMENT_S + 1)
            failing.set()

    assert [event["error"]["code"] for event in events] == ["rollout_deadline"]


# -- repeated requests -------------------------------------------------------------------------------------------------


REPEATED = [{"Idempotency-Key": "one"}, {"x-stainless-retry-count": "1"}]


@pytest.mark.parametrize("headers", REPEATED)
async def test_a_repeated_request_is_answered_from_the_record(chat: ChatFormat, headers: dict[str, str]) -> None:
    first = headers if "Idempotency-Key" in headers else {}
    rollout = of_script(chat, "yes", "again")
    async with serving(chat, rollout) as client:
        body = {"messages": ASK}
        answers = [(await client.post(PATH, body, headers=each))[1] for each in (first, headers, headers)]
        fresh = await client.chat(ASK)

    assert answers == [answers[0]] * 3
    assert fresh["choices"][0]["message"]["content"] == "again"
    assert len(rollout.asked) == 2


async def test_a_request_that_is_repeated_while_it_is_sampled_is_sampled_once(chat: ChatFormat) -> None:
    policy = Waiting(chat)
    rollout = Rollout(policy)
    async with serving(chat, rollout) as client:
        answers: list[Any] = []

        async def ask() -> None:
            answers.append(await client.post(PATH, {"messages": ASK}, headers=REPEATED[0]))

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(ask)
            await policy.begun.wait()
            policy.go.set()

    assert (len(answers), len(rollout.asked)) == (3, 1)


async def test_a_repeat_of_a_cancelled_request_is_sampled_anew(chat: ChatFormat) -> None:
    policy = Waiting(chat)
    rollout = Rollout(policy)
    async with serving(chat, rollout) as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.post, PATH, {"messages": ASK})
            await policy.begun.wait()
            tasks.cancel_scope.cancel()
        policy.go.set()
        status, _ = await client.post(PATH, {"messages": ASK}, headers=REPEATED[1])

    assert status == 200
    assert len(rollout.calls) == 1


# -- bad input ---------------------------------------------------------------------------------------------------------

MESSAGES = b'{"messages": [{"role": "user", "content": '


HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "no JSON": b"{",
    "truncated": MESSAGES + b'"on',
    "a list": b"[]",
    "null": b"null",
    "bytes": b"\xff\xfe\x00",
    "deep": b"[" * 100_000,
    "deep in an ignored field": MESSAGES + b'"x"}], "metadata": ' + b"[" * 100_000,
    "deep and whole": MESSAGES + b'"x"}], "metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep schema": MESSAGES
    + b'"x"}], "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": '
    + b"[" * 100_000,
    "lone surrogate": MESSAGES + rb'"\ud800"}]}',
    "bad UTF-8": MESSAGES + b'"\xff"}]}',
    "huge number": MESSAGES + b'"x"}], "temperature": 1e999}',
    "long number": MESSAGES + b'"x"}], "seed": ' + b"9" * 10_000 + b"}",
    "NaN": MESSAGES + b'"x"}], "temperature": NaN}',
    "many messages": b'{"messages": [' + b",".join([b'{"role": "user", "content": "x"}'] * 20_000) + b"]}",
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=list(HOSTILE))
async def test_hostile_bodies_are_refused_in_one_line(chat: ChatFormat, body: bytes) -> None:
    async with serving(chat, of_script(chat, "yes")) as client:
        status, error = await client.refused(PATH, body)
        await client.chat(ASK)

    assert status == 400
    assert "\n" not in error["message"]
    assert len(error["message"]) < 500


async def test_a_body_beyond_the_bound_is_413(chat: ChatFormat) -> None:
    async with serving(chat, of_script(chat)) as client:
        body = MESSAGES + b'"' + b"x" * 33 * 2**20 + b'"}]}'
        status, error = await client.refused(PATH, body)

    assert (status, error["type"]) == (413, "request_too_large")


@pytest.mark.parametrize("megabytes", [1, pytest.param(10, marks=pytest.mark.long)])
async def test_a_text_of_megabytes_is_a_prompt_like_others(megabytes: int, chat: ChatFormat) -> None:
    rollout = of_script(chat, ContextTooLong("too long"))
    async with serving(chat, rollout) as client:
        content = "on" * megabytes * 2**19
        status, error = await client.refused(PATH, {"messages": [{"role": "user", "content": content}]})

    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert len(rollout.asked[0][0]) > megabytes * 2**16


LONG = "on" * 2**17
RENDERED = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/completions": {"prompt": LONG},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": LONG}]},
    "/tokenize": {"prompt": LONG},
}


@pytest.mark.parametrize("path", RENDERED)
async def test_a_long_text_becomes_tokens_while_the_event_loop_goes_on(
    path: str, chat: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, free = PretrainedTokenizer.encode, threading.Event()

    def held(tokenizer: PretrainedTokenizer, text: str) -> list[int]:
        assert free.wait(10), "the event loop is held"
        return encode(tokenizer, text)

    rollout = of_script(chat, "yes")
    async with serving(chat, rollout) as client:
        root = f"{client.endpoint.url}/r/{client.served.key}"
        async with anyio.create_task_group() as tasks:
            monkeypatch.setattr(PretrainedTokenizer, "encode", held)
            tasks.start_soon(partial(client.post, path, RENDERED[path], url=root))
            await client.session.get(f"{root}/v1/models")
            free.set()


async def test_a_flood_of_calls_waits_unread_and_delays_no_other_rollout(
    chat: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_rollout, "MAX_CALLS", 4)
    policy = Waiting(chat)
    flooding, other = Rollout(policy), of_script(chat, "yes")
    async with serving(chat, flooding) as client, anyio.create_task_group() as tasks:
        for number in range(50):
            tasks.start_soon(client.chat, [{"role": "user", "content": f"{number}"}])
        await policy.begun.wait()
        with client.endpoint.serve(other) as served:
            status, _ = await client.post(PATH, {"messages": ASK}, url=served.base_url)
        assert (status, len(flooding.asked) <= 4) == (200, True)
        policy.go.set()

    assert len(flooding.calls) == 50


async def test_the_clients_of_a_rollout_share_its_bound_of_calls_at_once(
    chat: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_rollout, "MAX_CALLS", 1)
    at_once = []

    class Counts:
        async def drive(self, _: int, first: AgentClient) -> float:
            async with anyio.create_task_group() as tasks:
                for client in (first, first.another()):
                    tasks.start_soon(client.chat, ASK)
            return 1.0

    async def wait() -> None:
        at_once.append(1)
        await anyio.wait_all_tasks_blocked()
        at_once.append(-1)

    await drive_source(SourceEnv(Counts, FakePolicy(wait=wait), chat=chat, group_size=1, groups=1))

    assert at_once == [1, -1] * 2


async def test_a_prompt_that_is_too_long_is_told_in_the_words_by_which_clients_know_it(chat: ChatFormat) -> None:
    async with serving(chat, of_script(chat, ContextTooLong("too long"))) as client:
        _, error = await client.refused(PATH, {"messages": ASK})

    assert error["message"] == "prompt is too long: this model's maximum context length is exceeded: too long"


async def test_a_client_that_ends_within_its_body_is_left_alone(chat: ChatFormat) -> None:
    async with serving(chat, of_script(chat, "yes")) as client:
        host, _, port = client.endpoint.url.removeprefix("http://").partition(":")
        async with await anyio.connect_tcp(host, int(port)) as stream:
            path = client.served.base_url.removeprefix(client.endpoint.url) + PATH
            await stream.send(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{{".encode())
        await client.chat(ASK)
