"""A sender's side of a door, once it is let in: the end of the stream is the notice of death."""

from __future__ import annotations

from contextlib import suppress

import anyio

from ..._schemas import ProtocolMismatch
from ..._schemas.control import CloseAck, Closed, Reject
from ..errors import PeerClosed, PeerLost
from .control_connection import ControlConnection
from .heartbeat import GRACE_S, UNRESPONSIVE

__all__ = ["ShmControl"]


class ShmControl:
    """A `SenderControl`."""

    def __init__(self, connection: ControlConnection, heartbeat_timeout_s: float | None) -> None:
        self._connection = connection
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._disconnected = anyio.Event()
        self.close_acknowledged = False

    async def lost(self, receiver: str) -> PeerClosed | PeerLost:
        """See `SenderControl.lost`. Where ZeroMQ has cut the connection and the door stays open, it was silence."""
        lost: list[PeerClosed | PeerLost] = []
        async with anyio.create_task_group() as tasks:

            async def receive() -> None:
                lost.append(await self._heard(receiver))
                tasks.cancel_scope.cancel()

            tasks.start_soon(receive)
            await self._disconnected.wait()
            await anyio.sleep(GRACE_S)
            lost.append(PeerLost(f"{receiver}, the receiver, {UNRESPONSIVE.format(self._heartbeat_timeout_s)}"))
            tasks.cancel_scope.cancel()
        return lost[0]

    async def _heard(self, receiver: str) -> PeerClosed | PeerLost:
        with suppress(anyio.EndOfStream, ProtocolMismatch):
            message = await self._connection.receive()
            if isinstance(message, CloseAck):
                self.close_acknowledged = True
                message = await self._connection.receive()
            match message:
                case Closed():
                    return PeerClosed(f"{receiver}, the receiver, closed the channel")
                case Reject(_, reason):
                    return PeerClosed(f"{receiver}, the receiver, gave this sender up: {reason}")
        return PeerLost(f"{receiver}, the receiver, died: its connection is closed")

    def disconnected(self) -> None:
        """See `SenderControl.disconnected`."""
        self._disconnected.set()

    async def aclose(self) -> None:
        """See `SenderControl.aclose`."""
        await self._connection.aclose()
