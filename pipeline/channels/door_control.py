"""A sender's side of a door, once it is let in: the end of the stream is the notice of death."""

from __future__ import annotations

from contextlib import suppress

import anyio

from ...schemas import ProtocolMismatch
from ...schemas.control import Closed, Farewell, Refused
from ..errors import PeerClosed, PeerLost
from .door import Door
from .silence import GRACE_S, SILENT

__all__ = ["DoorControl"]


class DoorControl:
    """A `SenderControl`."""

    def __init__(self, door: Door, silence_s: float | None) -> None:
        self._door = door
        self._silence_s = silence_s
        self._disconnected = anyio.Event()
        self.goodbye_heard = False

    async def lost(self, receiver: str) -> PeerClosed | PeerLost:
        """See `SenderControl.lost`. Where ZeroMQ has cut the connection and the door stays open, it was silence."""
        lost: list[PeerClosed | PeerLost] = []
        async with anyio.create_task_group() as tasks:

            async def hear() -> None:
                lost.append(await self._heard(receiver))
                tasks.cancel_scope.cancel()

            tasks.start_soon(hear)
            await self._disconnected.wait()
            await anyio.sleep(GRACE_S)
            lost.append(PeerLost(f"{receiver}, the receiver, {SILENT.format(self._silence_s)}"))
            tasks.cancel_scope.cancel()
        return lost[0]

    async def _heard(self, receiver: str) -> PeerClosed | PeerLost:
        with suppress(anyio.EndOfStream, ProtocolMismatch):
            message = await self._door.hear()
            if isinstance(message, Farewell):
                self.goodbye_heard = True
                message = await self._door.hear()
            match message:
                case Closed():
                    return PeerClosed(f"{receiver}, the receiver, closed the channel")
                case Refused(_, reason):
                    return PeerClosed(f"{receiver}, the receiver, gave this sender up: {reason}")
        return PeerLost(f"{receiver}, the receiver, died: its connection is closed")

    def disconnected(self) -> None:
        """See `SenderControl.disconnected`."""
        self._disconnected.set()

    async def aclose(self) -> None:
        """See `SenderControl.aclose`."""
        await self._door.aclose()
