"""The acceptor of the shm transport: it admits or rejects each sender, and watches it until it disconnects.

A peer may be of another program, or hostile: a handshake has a deadline, and the number of those in progress is
bounded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeAlias

import anyio
from anyio.abc import Listener, SocketStream

from ..._schemas import ProtocolMismatch
from ..._schemas.control import Connect, Ready, Reject
from ..errors import (
    MemberNameInUse,
    MemberNameRequired,
    OutOfSharedMemory,
    PeerClosed,
    StaleDescriptor,
    TooManyMembers,
)
from .control_connection import ControlConnection, serve_control
from .heartbeat import DisconnectMonitor
from .peer import Peer
from .registry import Registry
from .transport import HANDSHAKE_S, Frames, PayloadReader

__all__ = ["Enter", "ShmAcceptor"]

MAX_HANDSHAKES = 64
"""Handshakes in progress at a time, beside those of as many senders as may join: each holds a file descriptor."""

REJECT_TIMEOUT_S = 1.0
"""How long sending a rejection may take: it is short, so that only a peer that does not read fails to get it."""

_HANDSHAKE_ERRORS = (
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
    anyio.EndOfStream,
    MemberNameInUse,
    MemberNameRequired,
    OSError,
    OutOfSharedMemory,
    PeerClosed,
    ProtocolMismatch,
    StaleDescriptor,
    TimeoutError,
    TooManyMembers,
)

Enter: TypeAlias = Callable[[ControlConnection], Awaitable[PayloadReader]]
"""Completes a handshake: receives the segment of the sender."""


class ShmAcceptor:
    """An `Acceptor` over control connections."""

    def __init__(
        self,
        registry: Registry,
        socket: Any,
        listener: Listener[SocketStream],
        enter: Enter,
        heartbeat_timeout_s: float | None,
    ) -> None:
        self.handshakes = 0
        """Handshakes in progress."""
        self._registry = registry
        self._admission, self._rejections = registry.admission, registry.rejections
        self._socket = socket
        self._listener = listener
        self._enter = enter
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._disconnect_monitor = (
            None
            if heartbeat_timeout_s is None
            else DisconnectMonitor(socket, heartbeat_timeout_s, self._disconnect_unresponsive)
        )
        self._accept_task = asyncio.get_running_loop().create_task(self._serve(), name="penstock shm acceptor")

    def __repr__(self) -> str:
        return f"<ShmAcceptor: {self.handshakes} in handshake, {self._admission!r}>"

    def handle_unknown(self, identity: bytes, frames: Frames) -> None:
        """Count a message from an identity that was not admitted; see `Acceptor.handle_unknown`."""
        del identity, frames
        self._rejections.record("a message from an unknown peer")

    def admitted(self) -> None:
        """Check that the new sender's ZeroMQ connection is made in time; see `Acceptor.admitted`."""
        if self._disconnect_monitor is not None:
            self._disconnect_monitor.expect_connection()

    async def aclose(self) -> None:
        """See `Acceptor.aclose`."""
        if self._disconnect_monitor is not None:
            self._disconnect_monitor.close()
        self._accept_task.cancel()
        try:
            with suppress(asyncio.CancelledError):
                await self._accept_task
        finally:
            try:
                await self._listener.aclose()  # for a receiver that closes before `_serve` has begun
            finally:
                self._socket.close()

    async def _serve(self) -> None:
        async with self._listener:
            await serve_control(self._listener, self._accept, self._rejections.record)

    async def _accept(self, connection: ControlConnection) -> None:
        if self.handshakes >= self._admission.max_senders + MAX_HANDSHAKES:
            self._rejections.record(f"{self.handshakes} other handshakes are in progress")
            return
        peer = await self._handshake(connection)
        if peer is not None:
            await self._until_disconnected(connection)
            if (rejection := self._registry.on_disconnect(peer)) is not None:
                await _send_rejection(connection, rejection)

    async def _handshake(self, connection: ControlConnection) -> Peer | None:
        self.handshakes += 1
        try:
            with anyio.fail_after(HANDSHAKE_S):
                return await self._admit(connection)
        except _HANDSHAKE_ERRORS as error:
            self._rejections.record(f"handshake failed: {type(error).__name__}: {error}")
            await _send_rejection(connection, Reject(type(error).__name__, str(error)))
            return None
        finally:
            self.handshakes -= 1

    async def _admit(self, connection: ControlConnection) -> Peer | None:
        request = await connection.receive()
        if not isinstance(request, Connect):
            raise ProtocolMismatch(f"expected a Connect, got {type(request).__name__}")
        other_user = None if connection.same_user else Reject("PeerClosed", "expected a process of the same user")
        rejection = other_user or self._admission.rejection(request)
        if rejection is not None:
            self._rejections.record(f"{request.name} (pid {request.pid}): {rejection.reason}")
            await connection.send(rejection)
            return None
        self._admission.check(request)
        self._admission.granted += 1
        try:
            reader = await self._enter(connection)
            if request.identity in self._registry.peers:
                raise ProtocolMismatch("expected an identity of its own, got one that was taken meanwhile")
            return self._admission.admit(request, connection, reader)
        except (anyio.BrokenResourceError, anyio.EndOfStream):  # a sender that was granted its place, and stopped
            return None
        finally:
            self._admission.granted -= 1

    async def _until_disconnected(self, connection: ControlConnection) -> None:
        """Send a sender that it is admitted, and wait for its end; it may die at any moment, this one included."""
        with suppress(anyio.BrokenResourceError, anyio.EndOfStream, ProtocolMismatch):
            await connection.send(Ready())
            await connection.receive()

    def _disconnect_unresponsive(self) -> None:
        """Disconnect the senders that have no ZeroMQ connection, but a control connection: they did not die."""
        self._registry.drain()
        for peer in list(self._registry.peers.values()):
            if peer.open and self._settled(peer) and not self._registry.reaches(peer):
                peer.unresponsive_s = self._heartbeat_timeout_s
                peer.control.shutdown_read()

    def _settled(self, peer: Peer) -> bool:
        """Return whether the ZeroMQ connection of `peer` existed, or has had the time to be made."""
        return peer.connected or time.monotonic() - peer.admitted_s >= (self._heartbeat_timeout_s or 0)


async def _send_rejection(connection: ControlConnection, rejection: Reject) -> None:
    """Send a peer the reason why it is not, or no longer, admitted, if it still receives."""
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError), anyio.move_on_after(REJECT_TIMEOUT_S):
        await connection.send(rejection)
