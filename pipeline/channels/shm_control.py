"""A sender's control connection over shm, once it has joined: the end of the stream is the notice of death."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import anyio

from ..._schemas import ProtocolMismatch
from ..._schemas.control import Message
from ..errors import PeerLost
from .control_connection import ControlConnection
from .heartbeat import GRACE_S, UNRESPONSIVE

__all__ = ["ShmControl"]


class ShmControl:
    """A `SenderControl`."""

    def __init__(self, connection: ControlConnection, heartbeat_timeout_s: float | None) -> None:
        self._connection = connection
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._disconnected = anyio.Event()

    async def lost(self, receiver: str, handle: Callable[[Message], None]) -> PeerLost:
        """See `SenderControl.lost`. Where ZeroMQ closed its connection and this one stays open, it was unresponsive."""
        lost: list[PeerLost] = []
        async with anyio.create_task_group() as tasks:

            async def receive() -> None:
                await self._receive_all(handle)
                lost.append(PeerLost(f"{receiver}, the receiver, died: its connection is closed"))
                tasks.cancel_scope.cancel()

            tasks.start_soon(receive)
            await self._disconnected.wait()
            await anyio.sleep(GRACE_S)
            lost.append(PeerLost(f"{receiver}, the receiver, {UNRESPONSIVE.format(self._heartbeat_timeout_s)}"))
            tasks.cancel_scope.cancel()
        return lost[0]

    async def _receive_all(self, handle: Callable[[Message], None]) -> None:
        with suppress(anyio.EndOfStream, ProtocolMismatch):
            while True:
                handle(await self._connection.receive())

    def disconnected(self) -> None:
        """See `SenderControl.disconnected`."""
        self._disconnected.set()

    async def aclose(self) -> None:
        """See `SenderControl.aclose`."""
        await self._connection.aclose()
