"""Sending from environments that are not Atropos', to real gateways, over connections that break."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream
from tests.atropos.environment import scored_group
from tests.atropos.gateways import client, process
from tests.atropos.proxies import ONLY_HTTP, proxied, running
from tests.failsafe import FAILSAFE_S

from penstock.errors import InvalidConfig, InvalidRecord
from penstock.integrations.atropos import AtroposAPIError, submit, submitting
from penstock.testing import group

LONG = 3000
"""Tokens of a sequence that is too long for shared memory of `ONLY_HTTP`."""


def long_group(item: int = 0) -> dict[str, Any]:
    return scored_group(item, group_size=2, tokens=LONG)


# -- to a gateway on this host -----------------------------------------------------------------------------------------


async def test_a_group_reaches_a_gateway_on_this_host_as_it_was() -> None:
    sent = group(instance_id="prompt 7", env="mazes", seed=3)
    async with running() as (pipeline, url):
        await submit(url, sent)
        await pipeline.has_trained(1)
        pipeline.check(1)

    (came,) = pipeline.trained
    assert came.id == sent.id
    assert came.meta == sent.meta
    for name, column in sent.columns().items():
        assert name == "policy_versions" or came.columns()[name].tobytes() == column.tobytes()


async def test_dicts_records_and_lists_of_them_are_sent_in_order_over_one_connection() -> None:
    async with running() as (pipeline, url):
        async with submitting(url) as submit_to:
            await submit_to(scored_group(0))
            await submit_to([scored_group(1), group(rewards=[5.0, 6.0])])
        await pipeline.has_trained(3)
        pipeline.check(3)

    assert [one.rewards.tolist() for one in pipeline.trained[:2]] == [
        pytest.approx(scored_group(item)["scores"]) for item in (0, 1)
    ]
    assert pipeline.trained[2].rewards.tolist() == [5.0, 6.0]


async def test_groups_that_are_too_large_for_shared_memory_go_over_http() -> None:
    async with running(shm_bytes=ONLY_HTTP) as (pipeline, url), proxied(url) as proxy:
        await submit(proxy.url, [long_group(0), scored_group(1, group_size=1, tokens=3), long_group(2)])
        await pipeline.has_trained(3)
        pipeline.check(3)

    assert {line for line in proxy.requests if "POST" in line} == {"POST /scored_data_list HTTP/1.1"}


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("groups", [1, 2])
async def test_a_submission_whose_answer_is_lost_is_accepted_once(times: int, groups: int) -> None:
    sent = [long_group(item) for item in range(groups)]
    async with running(shm_bytes=ONLY_HTTP) as (pipeline, url), proxied(url, times=times) as proxy:
        await submit(proxy.url, sent)
        await pipeline.has_trained(groups)
        await submit(proxy.url, long_group(9))  # whatever came twice is before it
        await pipeline.has_trained(groups + 1)
        pipeline.check(groups + 1)

    assert sum("POST" in line for line in proxy.requests) == times + 2


async def test_equal_groups_that_are_submitted_twice_are_both_accepted() -> None:
    async with running(shm_bytes=ONLY_HTTP) as (pipeline, url):
        async with submitting(url) as submit_to:
            for _ in range(2):
                await submit_to(long_group())
        await pipeline.has_trained(2)
        pipeline.check(2)


async def test_a_gateway_process_queues_a_submission_once_whose_answer_is_lost() -> None:
    with process("--shm-bytes", str(ONLY_HTTP)) as (_, url), client(url) as talk:
        talk.started(batch_size=2, max_token_len=10_000)
        async with proxied(url, times=1) as proxy:
            await submit(proxy.url, long_group())

        assert talk.get("/status")["queue_size"] == 1


async def test_a_gateway_that_is_full_is_waited_for() -> None:
    async with running(stopped=True, shm_bytes=ONLY_HTTP) as (pipeline, url):

        async def go_on() -> None:
            with anyio.fail_after(FAILSAFE_S):
                while not any("503" in line for line in proxy.answers):  # noqa: ASYNC110 (there is no event)
                    await anyio.sleep(0.001)
            pipeline.goes_on.set()

        async def submit_all(url: str) -> None:
            async with submitting(url) as submit_to:
                for item in range(7):
                    await submit_to(long_group(item))

        async with proxied(url) as proxy, anyio.create_task_group() as tasks:
            tasks.start_soon(go_on)
            await submit_all(proxy.url)
        await pipeline.has_trained(7)
        pipeline.check(7)


async def test_the_sender_of_a_group_that_cannot_be_trained_on_gets_the_reason() -> None:
    wrong = scored_group(0, group_size=1, tokens=3) | {"masks": [[-100, 1, 1]]}
    async with running() as (pipeline, url):
        with pytest.raises(AtroposAPIError, match=r"masks\[0\]\[1\]: expected -100, or \d+, its token, got 1") as error:
            await submit(url, wrong)

    assert error.value.situation == "rejected"
    assert pipeline.trained == []


async def test_a_dict_without_a_json_form_is_refused_before_it_is_sent() -> None:
    async with running() as (_, url):
        with pytest.raises(InvalidRecord, match="expected a group that has a JSON form"):
            await submit(url, scored_group(0) | {"images": object()})


async def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="url: expected http://host:port without a path, got 'localhost:8000'"):
        await submit("localhost:8000", group())


# -- to another server -------------------------------------------------------------------------------------------------


@asynccontextmanager
async def answering(answer: Callable[[bytes], bytes]) -> AsyncGenerator[tuple[str, list[bytes]]]:
    """Start another server than a gateway; `answer` makes an answer of the first line of a request."""
    asked: list[bytes] = []

    async def serve(stream: SocketStream) -> None:
        async with stream:
            async for piece in stream:
                if b"HTTP/1.1\r\n" in piece:
                    asked.append(piece.split(b" HTTP")[0])
                    body = answer(asked[-1])
                    status = {b"{}": b"404 Not Found", b"late": b"504 Gateway Timeout"}.get(body, b"200 OK")
                    await stream.send(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        yield f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}", asked  # noqa: S610 (of a socket)
        tasks.cancel_scope.cancel()


def original(request: bytes) -> bytes:
    answers = {b"GET /": b'{"message": "AtroposLib API"}', b"POST /scored_data": b'{"status": "received"}'}
    return answers.get(request, b"{}")


async def test_the_original_server_gets_groups_over_http() -> None:
    async with answering(original) as (url, asked):
        await submit(url, scored_group(0, group_size=1, tokens=3))

    assert asked == [b"GET /", b"GET /shm", b"POST /scored_data"]


async def test_a_server_that_knows_no_keys_is_sent_nothing_twice_that_it_may_have_received() -> None:
    async with answering(original) as (url, asked), proxied(url, times=1) as proxy:
        with pytest.raises(AtroposAPIError, match="expected an answer, got none") as error:
            await submit(proxy.url, scored_group(0, group_size=1, tokens=3))

    assert error.value.situation == "failed"
    assert asked.count(b"POST /scored_data") == 1


async def test_a_server_that_knows_no_keys_is_sent_nothing_twice_that_a_proxy_may_have_passed_on() -> None:
    def behind_a_proxy(request: bytes) -> bytes:
        return b"late" if request.startswith(b"POST") else original(request)

    async with answering(behind_a_proxy) as (url, asked):
        with pytest.raises(AtroposAPIError, match="got 504"):
            await submit(url, scored_group(0, group_size=1, tokens=3))

    assert asked.count(b"POST /scored_data") == 1
