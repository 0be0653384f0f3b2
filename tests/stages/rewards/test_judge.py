"""Against a real HTTP server on the test's own event loop."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from aiohttp import web
from tests.stages.answers import Characters, answering, drive_text

from penstock import Context, RewardBridge, TrajectoryGroup
from penstock.errors import InvalidConfig, MissingColumn
from penstock.policies import Backoff
from penstock.rewards import Judge, RewardInput
from penstock.testing import entered


class JudgeServer:
    """Answers with the length of the request's last message, and remembers every request."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.answer: Callable[[str], str] = lambda content: f"I would say {len(content)}."
        self.busy = 0
        self.running = self.most_running = 0
        self.may_answer = anyio.Event()
        self.may_answer.set()

    async def respond(self, request: web.Request) -> web.Response:
        asked = json.loads(await request.read())
        self.asked.append(asked)
        self.headers.append(dict(request.headers))
        if self.busy:
            self.busy -= 1
            return web.json_response({"error": {"message": "overloaded"}}, status=503)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await anyio.wait_all_tasks_blocked()
        await self.may_answer.wait()
        self.running -= 1
        message = {"role": "assistant", "content": self.answer(asked["messages"][-1]["content"])}
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})


@asynccontextmanager
async def serving() -> AsyncGenerator[JudgeServer]:
    server = JudgeServer()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.respond)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield server
    finally:
        server.may_answer.set()
        await runner.cleanup()


def bridge(server: JudgeServer, prompt: Any = "{completion}", **options: Any) -> RewardBridge:
    arguments: dict[str, Any] = {"backoff": Backoff(attempts=1)} | options
    judge = Judge(server.url, "judge-7b", prompt, **arguments)
    return RewardBridge(functions=[judge])


def question(*completions: str, instance_id: str = "0") -> TrajectoryGroup:
    return answering(
        *completions, instance_id=instance_id, meta={"prompt": "2+2?", "row": {"answer": "4", "prompt": "2+2?"}}
    )


async def test_the_last_number_of_the_response_is_the_score() -> None:
    async with serving() as server:
        stage = bridge(server, "Rate {completion} to {prompt}, right is {answer}:", weight=0.1, api_key="secret")

        (out,) = await drive_text(stage, [question("four")])

        assert server.asked == [
            {
                "model": "judge-7b",
                "messages": [{"role": "user", "content": "Rate four to 2+2?, right is 4:"}],
                "temperature": 0,
            }
        ]
        assert server.headers[0]["Authorization"] == "Bearer secret"
        assert out.rewards.tolist() == pytest.approx([3.0])


async def test_prompt_request_and_parse_can_be_code() -> None:
    def messages(completion: RewardInput) -> list[dict[str, str]]:
        return [{"role": "system", "content": "Be strict."}, {"role": "user", "content": completion.text}]

    async with serving() as server:
        server.answer = lambda content: "yes" if content == "4" else "no"
        stage = bridge(server, messages, parse=lambda text: float(text == "yes"), request={"max_tokens": 1})

        (out,) = await drive_text(stage, [question("4", "5")])

        assert out.rewards.tolist() == [1, 0]
        assert server.asked[0]["messages"][0] == {"role": "system", "content": "Be strict."}
        assert (server.asked[0]["max_tokens"], "temperature" in server.asked[0]) == (1, False)


async def test_a_pattern_with_a_group_reads_its_last_match() -> None:
    async with serving() as server:
        server.answer = lambda _content: "Score: 3/10? No. Score: 7/10"

        (out,) = await drive_text(bridge(server, parse=r"Score: (\d+)"), [question("a")])

        assert out.rewards.tolist() == [7]


async def test_equal_requests_are_sent_once_also_at_the_same_time() -> None:
    async with serving() as server:
        out = await drive_text(bridge(server), [question("a", "a", "bb"), question("bb", "a", instance_id="1")])

        assert sorted(asked["messages"][0]["content"] for asked in server.asked) == ["a", "bb"]
        assert [group.rewards.tolist() for group in out] == [[1, 1, 2], [2, 1]]
        assert out.metrics.emit(0)["rewards/judge/cached"] == 3


async def test_the_cache_forgets_what_was_not_used_for_longest() -> None:
    async with serving() as server:
        groups = [question(text, instance_id=str(i)) for i, text in enumerate(["a", "b", "a", "c", "a", "b"])]
        await drive_text(bridge(server, cached=2, concurrency=1), groups)

        assert [asked["messages"][0]["content"] for asked in server.asked] == ["a", "b", "c", "b"]


async def test_no_more_requests_run_at_a_time_than_were_allowed() -> None:
    async with serving() as server:
        await drive_text(bridge(server, concurrency=2), [question("a", "bb", "ccc", "dddd")])

        assert server.most_running == 2


async def test_a_response_without_a_number_costs_the_completion_and_is_not_cached() -> None:
    async with serving() as server:
        server.answer = lambda content: "no idea" if content == "?" else "1"

        out = await drive_text(bridge(server), [question("?", "4", "?")])

        assert out[0].rewards.tolist() == [1]
        (reason,) = out.ledger.balance().reasons["failed"]
        assert reason.startswith("judge: UnreadableScore: expected a number by ")
        assert reason.endswith("in the judge's response, got 'no idea'")
        assert len(server.asked) == 3


async def test_a_temporary_failure_is_retried_and_a_lasting_one_costs_the_completion() -> None:
    async with serving() as server:
        server.busy = 2
        (out,) = await drive_text(bridge(server, backoff=Backoff(attempts=3, first_s=0, longest_s=0)), [question("a")])
        assert out.rewards.tolist() == [1]

        server.busy = 1
        failed = await drive_text(bridge(server), [question("a")])
        (reason,) = failed.ledger.balance().reasons["failed"]
        assert "EngineFailed" in reason
        assert "503: overloaded" in reason


async def test_a_judge_that_does_not_respond_costs_the_completion() -> None:
    async with serving() as server:
        server.may_answer = anyio.Event()

        out = await drive_text(bridge(server, reward_timeout_s=0.05), [question("a")])

        (reason,) = out.ledger.balance().reasons["failed"]
        assert re.match(r"judge: (TimeoutError|EngineTimedOut): .* within 0\.05 s, got none", reason)


async def test_a_column_that_the_data_lacks_ends_the_run() -> None:
    async with serving() as server:
        with pytest.raises(
            MissingColumn, match=r"a column 'anser', which the template names, .* did you mean 'answer'"
        ):
            await drive_text(bridge(server, "{completion} {anser}"), [question("a")])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "127.0.0.1:8000"}, r"Judge\.url: expected http://host:port without a path"),
        ({"prompt": "Rate it."}, r"Judge\.prompt: expected a template with \{completion\}, got 'Rate it\.'"),
        ({"prompt": "{completion} {"}, r"Judge\.prompt: expected a template with \{completion\}, got"),
        ({"parse": "("}, r"Judge\.parse: expected a regular expression, got '\('"),
        ({"cached": 0}, r"Judge\.cached: expected a whole number of at least 1, got 0"),
        ({"weight": float("inf")}, "judge: weight: expected a finite number"),
    ],
)
def test_a_judge_that_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"url": "http://127.0.0.1:8000", "model": "m", "prompt": "{completion}"} | options

    with pytest.raises(InvalidConfig, match=message):
        Judge(**arguments)


# -- reading what a model wrote ----------------------------------------------------------------------------------------


async def test_a_match_that_takes_without_end_ends_with_its_call_and_costs_no_other() -> None:
    async with serving() as server:
        server.answer = lambda content: "a" * 40 if content == "slow" else "aa: 7"
        judge = Judge(server.url, "judge-7b", "{completion}", parse=r"(?:a+)+: (\d)")

        with entered(Context(tokenizer=Characters())):
            async with judge.open() as score:
                with anyio.move_on_after(0.5) as given_up:
                    await score(completion("slow"))
                read = await score(completion("fast"))

        assert given_up.cancelled_caught
        assert read == 7


def completion(text: str) -> RewardInput:
    return RewardInput(trajectory=question(text)[0], score=0.0, text=text, meta={})


async def test_numbers_by_the_megabyte_do_not_hold_the_event_loop() -> None:
    async with serving() as server:
        server.answer = lambda _: "1 " * 10**6 + "8"
        stage, turns = bridge(server), 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await anyio.sleep(0.005)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(count)
            (out,) = await drive_text(stage, [question("much")])
            assert out.rewards.tolist() == [8.0]
            tasks.cancel_scope.cancel()

        assert turns > 20
