"""What a server may answer: so many bytes for so many tokens, and no other host. Against real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np
import pytest
from tests.fake_policy import Letters

from penstock import Context, Worker
from penstock.errors import EngineRefused, PenstockError
from penstock.policies import Backoff, HttpPolicy, SamplingParams
from penstock.rewards import Judge, RewardInput
from penstock.teachers import HttpTeacher
from penstock.testing import entered, group

MIB = 2**20

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


class HostileServer:
    """Answers each request for a response with tokens by `answer`, and any other with the list of its model."""

    def __init__(self) -> None:
        self.url = ""
        self.answer: Answer
        self.requests: list[str] = []
        self.sent = 0

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            self.requests.append(head.split("\r\n")[0])
            if "content-length: " in head:
                await reader.readexactly(int(head.partition("content-length: ")[2].split("\r\n")[0]))
            if head.startswith("get"):
                body = b'{"data": [{"id": "model"}]}'
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(body), body)
                )
            else:
                await self.answer(writer)
            await writer.drain()
        writer.close()

    async def without_end(self, writer: asyncio.StreamWriter, status: str = "200 OK") -> None:
        writer.write(f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n\r\n".encode())
        while True:
            writer.write(b": 1 1 1 1 1 1 1\n" * 4096)
            self.sent += 16 * 4096
            await writer.drain()

    async def error_without_end(self, writer: asyncio.StreamWriter) -> None:
        await self.without_end(writer, "400 Bad Request")


@asynccontextmanager
async def serving() -> AsyncGenerator[HostileServer]:
    server = HostileServer()
    listener = await asyncio.start_server(server.connected, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with listener:
        yield server


async def sample(url: str) -> None:
    policy = HttpPolicy(url=url, model="model", server="openai", backoff=Backoff(attempts=1))
    async with policy.open(Worker()) as engine:
        await engine.generate([np.array([1], np.int32)], SamplingParams(max_completion_tokens=8))


async def judge(url: str) -> None:
    options: dict[str, Any] = {"request": {"max_tokens": 8}, "backoff": Backoff(attempts=1)}
    async with Judge(url, "model", "{completion}", **options).open() as score:
        await score(RewardInput(trajectory=group()[0], score=0.0, text="text", meta={}))


async def teach(url: str) -> None:
    async with HttpTeacher(url=url, model="model", tokenizer=Letters()).open(Worker()) as engine:
        await engine.candidates(np.arange(4, dtype=np.int32), np.ones(4, np.bool_), 2)


CLIENTS = pytest.mark.parametrize("ask", [sample, judge, teach], ids=lambda ask: ask.__name__)


@CLIENTS
async def test_a_response_without_end_is_cut_off_at_the_bound_of_its_tokens(ask: Callable[[str], Any]) -> None:
    async with serving() as server:
        server.answer = server.without_end

        with entered(Context()), pytest.raises(PenstockError, match=r"at most [\d,]+ bytes, got more"):
            await ask(server.url)

        assert server.sent < 16 * MIB


@CLIENTS
async def test_an_error_without_end_is_read_to_its_beginning(ask: Callable[[str], Any]) -> None:
    async with serving() as server:
        server.answer = server.error_without_end

        with entered(Context()), pytest.raises(EngineRefused, match="400"):
            await ask(server.url)

        assert server.sent < 16 * MIB


@CLIENTS
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_refused_and_no_other_host_is_asked(ask: Callable[[str], Any], status: int) -> None:
    async with serving() as server, serving() as other:

        async def redirect(writer: asyncio.StreamWriter) -> None:
            writer.write(f"HTTP/1.1 {status} Elsewhere\r\nLocation: {other.url}/v1\r\n\r\n".encode())

        server.answer = redirect

        with entered(Context()), pytest.raises(EngineRefused, match=f"got a redirect to {other.url}/v1: set the URL"):
            await ask(server.url)

        assert other.requests == []
