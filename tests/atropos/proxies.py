"""Pipelines that a gateway feeds, and proxies before them which lose answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import anyio
from anyio.abc import SocketAttribute, SocketStream
from tests.failsafe import FAILSAFE_S

from penstock import ReceiveChannel, TrajectoryGroup, current, source
from penstock.accounting import Ledger
from penstock.integrations.atropos import AtroposGateway, ServerConfig

__all__ = ["ONLY_HTTP", "Pipeline", "Proxy", "proxied", "running"]

ONLY_HTTP = 2**13
"""Bytes of shared memory that a group of 3,000 tokens does not fit into."""


class Pipeline:
    """A gateway as a source, and a sink that trains everything."""

    def __init__(self, **config: Any) -> None:
        self.gateway = AtroposGateway(
            batch_size=64, max_token_len=10_000, server=ServerConfig(port=0, **config), capacity=2
        )
        self.trained: list[TrajectoryGroup] = []
        self.ledger = Ledger()
        self.goes_on = anyio.Event()
        self._arrived = anyio.Event()

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        self.ledger = current().ledger
        async for one in inbox:
            await self.goes_on.wait()
            self.trained.append(one.owned())
            current().ledger.end(one, "trained")
            self._arrived.set()
            self._arrived = anyio.Event()

    async def has_trained(self, groups: int) -> None:
        with anyio.fail_after(FAILSAFE_S):
            while len(self.trained) < groups:
                await self._arrived.wait()

    def check(self, groups: int) -> None:
        """Assert that all sequences were trained once, and none is in flight or lost."""
        balance = self.ledger.balance()
        assert len(self.trained) == groups
        assert balance.admitted == balance.ended["trained"] == sum(map(len, self.trained))
        assert balance.balanced


@asynccontextmanager
async def running(*, stopped: bool = False, **config: Any) -> AsyncGenerator[tuple[Pipeline, str]]:
    """Run a pipeline that is fed by a gateway, and yield the gateway's address."""
    pipeline = Pipeline(**config)
    if not stopped:
        pipeline.goes_on.set()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(source(pipeline.gateway).sink(pipeline).run)
        with anyio.fail_after(FAILSAFE_S):
            url = await pipeline.gateway.listening.url()
        yield pipeline, url
        tasks.cancel_scope.cancel()


class Proxy:
    """Stands before a server, and loses the answers to the first `times` requests that begin with `cut`."""

    def __init__(self, url: str, cut: str, *, times: int) -> None:
        self.url = ""
        self.requests: list[str] = []
        self.answers: list[str] = []
        self._to = urlsplit(url)
        self._cut = cut
        self._times = times

    async def serve(self, stream: SocketStream) -> None:
        server = await anyio.connect_tcp(str(self._to.hostname), self._to.port or 80)
        async with stream, server, anyio.create_task_group() as tasks:
            tasks.start_soon(self._requests, stream, server, tasks.cancel_scope)
            tasks.start_soon(self._answers, server, stream, tasks.cancel_scope)

    async def _requests(self, stream: SocketStream, server: SocketStream, scope: anyio.CancelScope) -> None:
        async for piece in stream:
            if (line := piece.split(b"\r\n")[0].decode(errors="replace")).endswith("HTTP/1.1"):
                self.requests.append(line)
            await server.send(piece)
        scope.cancel()

    async def _answers(self, server: SocketStream, stream: SocketStream, scope: anyio.CancelScope) -> None:
        async for piece in server:
            self.answers.append(piece.split(b"\r\n")[0].decode(errors="replace"))
            if self._times and self.requests[-1].startswith(self._cut):
                self._times -= 1
                break  # the server has answered, and the answer is lost
            await stream.send(piece)
        scope.cancel()


@asynccontextmanager
async def proxied(url: str, cut: str = "POST /scored_data", *, times: int = 0) -> AsyncGenerator[Proxy]:
    """Start a proxy for `url`."""
    proxy = Proxy(url, cut, times=times)
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        proxy.url = f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}"  # noqa: S610 (of a socket)
        tasks.start_soon(listener.serve, proxy.serve)
        yield proxy
        tasks.cancel_scope.cancel()
