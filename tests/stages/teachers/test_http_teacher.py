"""The teacher over HTTP, at a server that answers as vLLM does."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from tests.stages.teachers.test_teacher import Letters

from penstock import Teacher, TrajectoryGroup
from penstock.errors import EngineFailed, EngineRefused, InvalidConfig, NobodyListens
from penstock.policies import Backoff
from penstock.teachers import HttpTeacher
from penstock.testing import Driven, drive, group

Reply = Callable[[dict[str, Any]], web.Response]


def expected(index: int, logprob: float) -> dict[str, Any]:
    return {str(index): {"logprob": logprob, "rank": 1, "decoded_token": "?"}}


def as_vllm(asked: dict[str, Any]) -> web.Response:
    """Return for every token but the first a likely one, and the token itself, in that order."""
    rows = [None, *(expected(3, -0.1) | expected(token, -5.0) for token in asked["prompt"][1:])]
    choice = {"index": 0, "text": "x", "finish_reason": "length", "prompt_logprobs": rows}
    return web.json_response({"id": "cmpl-1", "object": "text_completion", "choices": [choice]})


@asynccontextmanager
async def serving(*replies: Reply) -> AsyncGenerator[tuple[str, list[dict[str, Any]]]]:
    """Serve one reply after another, the last one repeatedly; yield the URL and the requests."""
    questions: list[dict[str, Any]] = []

    async def models(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer secret"
        return web.json_response({"object": "list", "data": [{"id": "large"}]})

    async def answer(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer secret"
        questions.append(await request.json())
        return replies[min(len(questions), len(replies)) - 1](questions[-1])

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}", questions
    finally:
        await runner.cleanup()


async def taught(url: str, *, model: str = "large", groups: int = 1) -> Driven[TrajectoryGroup]:
    given = [
        group(completion_lengths=[2], prompt_length=1, tokens=[7, 8, 9], instance_id=str(number))
        for number in range(groups)
    ]
    teacher = HttpTeacher(url=url, model=model, tokenizer=Letters(), api_key="secret")
    return await drive(Teacher(teacher, top_k=1, backoff=Backoff(attempts=2, first_s=0.001)), given)


async def test_the_servers_prompt_logprobs_become_candidates() -> None:
    async with serving(as_vllm) as (url, questions):
        (out,) = await taught(url)

    assert questions == [{"model": "large", "prompt": [7, 8, 9], "max_tokens": 1, "prompt_logprobs": 1}]
    assert out.teacher_ids is not None
    assert out.teacher_ids.tolist() == [[-1, -1], [8, 3], [9, 3]]


async def test_a_server_that_is_busy_is_asked_again() -> None:
    async with serving(lambda _: web.Response(status=503), as_vllm) as (url, questions):
        out = await taught(url)

    assert len(out) == 1
    assert len(questions) == 2


@pytest.mark.parametrize(
    "reply",
    [
        lambda _: web.json_response({"error": {"message": "prompt_logprobs above max_logprobs"}}, status=400),
        lambda _: web.json_response({"choices": [{"text": "x"}]}),
        lambda _: web.json_response({"choices": []}),
        lambda _: web.json_response({"choices": [{"prompt_logprobs": [None, expected(3, -math.pi)]}]}),
    ],
    ids=["refused", "another server", "nothing", "too few"],
)
async def test_a_refusal_or_an_invalid_answer_is_a_failure_at_once(reply: Reply) -> None:
    async with serving(reply) as (url, questions):
        out = await taught(url)

    assert out == []
    assert out.ledger.balance().reasons["failed"] == {"the teacher failed": 1}
    assert len(questions) == 1


async def test_a_server_that_is_not_there_is_an_error_before_anything_is_asked() -> None:
    async with serving(as_vllm) as (url, questions):
        pass

    with pytest.raises(NobodyListens, match=r"/v1/models, attempt 3 of 3: expected a server, got no connection"):
        await taught(url)

    assert questions == []


async def test_a_server_that_has_another_model_is_an_error_before_anything_is_asked() -> None:
    async with serving(as_vllm) as (url, questions):
        with pytest.raises(EngineRefused, match=r"expected 'larger' at http.*, got \['large'\]"):
            await taught(url, model="larger")

    assert questions == []


async def test_a_server_that_has_the_model_and_never_answers_is_an_error_and_not_an_empty_run() -> None:
    async with serving(lambda _: web.Response(status=503, text="no engine")) as (url, _):
        with pytest.raises(
            EngineFailed, match=r"failures in 8 groups and no response since the start; .*503: no engine"
        ):
            await taught(url, groups=32)


def test_a_url_that_leads_nowhere_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"HttpTeacher\.url: expected http://host:port without a path"):
        HttpTeacher(url="localhost:8000/v1", model="large", tokenizer=Letters())
