"""A sender's control connection over shm, once it has joined: the end of the stream is the notice of death."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress

import anyio

from ..._schemas import ProtocolMismatch
from ..._schemas.control import Message
from ..errors import PeerLost
from .control_connection import ControlConnection
from .heartbeat import GRACE_S, UNRESPONSIVE


class ShmControl:
    """A `SenderControl`."""

    def __init__(self, connection: ControlConnection, heartbeat_timeout_s: float | None) -> None:
        self._connection = connection
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._deadline = math.inf
        """The time at which the receiver counts as unresponsive, unless this connection ends before."""
        self._scope = anyio.CancelScope()
        """Ends the wait for the next message at the deadline."""

    async def next_event(self, receiver: str) -> Message | PeerLost:
        """See `SenderControl.next_event`. Where only ZeroMQ closed its connection, the receiver is unresponsive."""
        with anyio.CancelScope(deadline=self._deadline) as self._scope, suppress(anyio.EndOfStream, ProtocolMismatch):
            return await self._connection.receive()
        if self._scope.cancelled_caught:
            return PeerLost(f"{receiver}, the receiver, {UNRESPONSIVE.format(self._heartbeat_timeout_s)}")
        return PeerLost(f"{receiver}, the receiver, died: its connection is closed")

    def disconnected(self) -> None:
        """See `SenderControl.disconnected`."""
        self._deadline = min(self._deadline, asyncio.get_running_loop().time() + GRACE_S)
        self._scope.deadline = self._deadline

    def delivered_bytes(self) -> int:
        """See `SenderControl.delivered_bytes`: messages arrive at once."""
        return 0

    async def aclose(self) -> None:
        """See `SenderControl.aclose`."""
        await self._connection.aclose()
