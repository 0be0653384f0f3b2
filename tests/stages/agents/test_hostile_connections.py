"""Connections to the endpoint that send nothing, or never all of a request: no call waits for them."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from anyio.abc import SocketStream
from tests.loop_clock import LoopClock
from tests.stages.agents.served import Client, Rollout, chat_format, completion_of, of_script, serving

from penstock._stages.agents.endpoint.agent_endpoint import CONNECTIONS, REQUEST_BYTES
from penstock.chat import ChatFormat

ASK = [{"role": "user", "content": "one?"}]

HELD = """
import socket, sys
port, count, first = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].encode()
held = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
for each in held:
    each.sendall(first)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def chat(tmp_path: Path) -> ChatFormat:
    return chat_format(tmp_path)


def port_of(client: Client) -> int:
    return int(client.endpoint.url.rpartition(":")[2])


async def received(stream: SocketStream) -> bytes:
    """Return all that comes until the server closes the connection."""
    came = b""
    with suppress(anyio.BrokenResourceError):
        async for piece in stream:
            came += piece
    return came


BEGINNINGS = {
    "nothing": b"",
    "headers": b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n",
    "a body": b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{",
    "a chunk": b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
}


@pytest.mark.parametrize("beginning", BEGINNINGS)
async def test_a_request_that_is_never_complete_ends_by_a_deadline(beginning: str, chat: ChatFormat) -> None:
    answers: list[bytes] = []
    async with serving(chat, of_script(chat, "yes")) as client:
        body = BEGINNINGS[beginning].replace(b"/v1", f"/r/{client.served.key}/v1".encode())
        async with await anyio.connect_tcp("127.0.0.1", port_of(client)) as slow, anyio.create_task_group() as tasks:
            await slow.send(body)

            async def hear() -> None:
                answers.append(await received(slow))

            tasks.start_soon(hear)
            await client.chat(ASK)  # no other waits
            await LoopClock().set_forward_until(lambda: bool(answers), 60)

    assert answers[0].startswith(b"HTTP/1.1 408 Request Timeout")
    assert b'"message":"expected ' in answers[0]


async def test_a_body_beyond_the_bound_without_a_length_is_413(chat: ChatFormat) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(REQUEST_BYTES // 2**20 + 1):
            yield b" " * 2**20

    async with (
        serving(chat, of_script(chat)) as client,
        client.session.post(client.served.base_url + "/chat/completions", data=pieces()) as came,
    ):
        assert (came.status, (await came.json())["error"]["type"]) == (413, "request_too_large")


@pytest.mark.long
@pytest.mark.parametrize("beginning", ["nothing", "headers"])
async def test_thousands_of_idle_connections_do_not_slow_a_call(beginning: str, chat: ChatFormat) -> None:
    """As many as this process may open, at most 10,000.

    The least processor time of a hundred calls, which neighbours change little: going through all connections once
    would make it tenfold.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(10_000, CONNECTIONS, files // 2) - 100

    async def sample(*_: object) -> Any:
        return completion_of(chat, "yes")

    async def cost(client: Client) -> float:
        took = []
        for _ in range(100):
            began = time.process_time()
            await client.chat(ASK)
            took.append(time.process_time() - began)
        return min(took)

    async with serving(chat, Rollout(sample)) as client:
        alone = await cost(client)
        command = [sys.executable, "-c", HELD, str(port_of(client)), str(count), BEGINNINGS[beginning].decode()]
        async with await anyio.open_process(command) as holder:
            assert holder.stdout is not None
            assert await holder.stdout.receive() == b"held\n"
            beside = await cost(client)
            holder.kill()

    assert beside <= 3 * alone
