"""A TCP proxy between two ends on this machine: it stalls, cuts, slows down, and closes idle connections."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel
from anyio.abc import SocketAttribute, SocketStream
from tests.moments import moment

PART_BYTES = 2**14


@dataclass
class Proxy:
    """Forwards the connections of one port to another one."""

    to: int
    idle_timeout_s: float = float("inf")
    """A connection on which nothing was forwarded for so long is closed, without notice to anyone."""
    part_s: float = 0.0
    """Seconds for each `PART_BYTES`: 0.01 limits a direction to 1.6 MB/s."""
    port: int = 0
    connections: int = 0
    """Connections so far."""
    parts: int = 0
    """Parts that were forwarded, in both directions."""
    flowing: anyio.Event = field(default_factory=anyio.Event)
    """Parts wait for it."""
    _scopes: list[anyio.CancelScope] = field(default_factory=list)

    def stall(self) -> None:
        """Forward nothing until `resume`, and keep every connection open."""
        self.flowing = anyio.Event()

    def resume(self) -> None:
        """Forward again."""
        self.flowing.set()

    def cut(self) -> None:
        """Close all connections."""
        for scope in self._scopes:
            scope.cancel()

    async def until_parts(self, count: int) -> None:
        """Wait until so many more parts were forwarded."""
        aim = self.parts + count
        while self.parts < aim:
            await moment()

    async def handle(self, near: SocketStream) -> None:
        self.connections += 1
        with anyio.CancelScope() as scope:
            self._scopes.append(scope)
            async with near, await anyio.connect_tcp("127.0.0.1", self.to) as far, anyio.create_task_group() as tasks:
                idle = anyio.CancelScope(deadline=anyio.current_time() + self.idle_timeout_s)
                tasks.start_soon(self._forward, near, far, idle, tasks.cancel_scope)
                tasks.start_soon(self._forward, far, near, idle, tasks.cancel_scope)
                with idle:
                    await anyio.sleep_forever()
                tasks.cancel_scope.cancel()

    async def _forward(
        self, source: SocketStream, sink: SocketStream, idle: anyio.CancelScope, both: anyio.CancelScope
    ) -> None:
        try:
            async for part in source:
                await self.flowing.wait()
                await anyio.sleep(self.part_s * len(part) / PART_BYTES)
                await sink.send(part)
                self.parts += 1
                idle.deadline = anyio.current_time() + self.idle_timeout_s
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
        both.cancel()


@asynccontextmanager
async def proxied(url: str, idle_timeout_s: float = float("inf")) -> AsyncIterator[tuple[Proxy, str]]:
    """Run a proxy in front of `url` within the body; yield it, and its own URL."""
    proxy = Proxy(int(url.rpartition(":")[2]), idle_timeout_s)
    proxy.resume()
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    proxy.port = listener.extra(SocketAttribute.local_port)  # noqa: S610 (an attribute of a socket)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, proxy.handle)
        yield proxy, f"tcp://127.0.0.1:{proxy.port}"
        tasks.cancel_scope.cancel()
