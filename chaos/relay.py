"""A relay between senders and a receiver over TCP that changes bits of what it forwards. Knows no messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import TypeAlias

import anyio
from anyio.abc import SocketAttribute, SocketStream

__all__ = ["BitFlips", "Change", "relayed"]

Change: TypeAlias = Callable[[bool, bytes], bytes]
"""Returns the bytes to forward in place of those that came next: to the receiver (True), or from it."""


class BitFlips:
    """A change that flips a bit of the next bytes whenever `due` is set."""

    def __init__(self, random: Random) -> None:
        self.due = False
        self._random = random

    def __call__(self, _: bool, part: bytes) -> bytes:  # noqa: FBT001 (see `Change`)
        """See `Change`."""
        if not self.due:
            return part
        self.due = False
        changed = bytearray(part)
        changed[self._random.randrange(len(part))] ^= 1 << self._random.randrange(8)
        return bytes(changed)


@asynccontextmanager
async def relayed(to: int, changes: Callable[[], Change], port: int = 0) -> AsyncIterator[int]:
    """Forward connections to port `to` within the body, each through a change of its own; yield the relay's port."""

    async def relay(near: SocketStream) -> None:
        with suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            async with near, await anyio.connect_tcp("127.0.0.1", to) as far:
                await _both(near, far, changes())

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=port)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, relay)
        yield int(listener.extra(SocketAttribute.local_port))  # noqa: S610 (an attribute of a socket)
        tasks.cancel_scope.cancel()


async def _both(near: SocketStream, far: SocketStream, change: Change) -> None:
    """Forward both directions of a connection until either ends."""

    async def forward(source: SocketStream, sink: SocketStream, *, to_receiver: bool) -> None:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for part in source:
                await sink.send(change(to_receiver, part))
        directions.cancel_scope.cancel()

    async with anyio.create_task_group() as directions:
        directions.start_soon(lambda: forward(near, far, to_receiver=True))
        directions.start_soon(lambda: forward(far, near, to_receiver=False))
