"""Lets senders in over shm: each is introduced at the door, let in or refused, and watched until it ends or is silent.

Whoever comes may be a stranger, or hostile: an introduction has a deadline, and only so many may be under way at a
time.
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
"""Introductions under way at a time, beside those of as many senders as may come: each holds a file descriptor."""

REJECT_TIMEOUT_S = 1.0
"""How long a refusal may take to be heard: it is short, so only who does not read at all is not told."""

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
"""Completes an introduction: takes the sender's segment in."""


class ShmAcceptor:
    """Serves a door: an `Acceptor`."""

    def __init__(
        self,
        registry: Registry,
        socket: Any,
        listener: Listener[SocketStream],
        enter: Enter,
        heartbeat_timeout_s: float | None,
    ) -> None:
        self.entering = 0
        """Introductions under way."""
        self._registry = registry
        self._admission, self._refusals = registry.admission, registry.refusals
        self._socket = socket
        self._listener = listener
        self._enter = enter
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._severances = (
            None
            if heartbeat_timeout_s is None
            else DisconnectMonitor(socket, heartbeat_timeout_s, self._look_for_the_silent)
        )
        self._accept_task = asyncio.get_running_loop().create_task(self._serve(), name="penstock receiver door")

    def __repr__(self) -> str:
        return f"<ShmAcceptor: {self.entering} entering, {self._admission!r}>"

    def handle_unknown(self, identity: bytes, frames: Frames) -> None:
        """Count a message from an identity that was not let in at the door; see `Acceptor.handle_unknown`."""
        del identity, frames
        self._refusals.note("a message from a stranger")

    def admitted(self) -> None:
        """See to it that the newcomer's ZeroMQ connection comes in time; see `Acceptor.admitted`."""
        if self._severances is not None:
            self._severances.expect()

    async def aclose(self) -> None:
        """See `Acceptor.aclose`."""
        if self._severances is not None:
            self._severances.close()
        self._accept_task.cancel()
        try:
            with suppress(asyncio.CancelledError):
                await self._accept_task
        finally:
            try:
                await self._listener.aclose()  # who leaves at once does so before the doorman has begun
            finally:
                self._socket.close()

    async def _serve(self) -> None:
        async with self._listener:
            await serve_control(self._listener, self._accept, self._refusals.note)

    async def _accept(self, connection: ControlConnection) -> None:
        if self.entering >= self._admission.most + MAX_HANDSHAKES:
            self._refusals.note(f"{self.entering} others are being introduced")
            return
        peer = await self._handshake(connection)
        if peer is not None:
            await self._until_disconnected(connection)
            if (refused := self._registry.gone(peer)) is not None:
                await _tell(connection, refused)

    async def _handshake(self, connection: ControlConnection) -> Peer | None:
        self.entering += 1
        try:
            with anyio.fail_after(HANDSHAKE_S):
                return await self._let_in(connection)
        except _HANDSHAKE_ERRORS as error:
            self._refusals.note(f"introduction failed: {type(error).__name__}: {error}")
            await _tell(connection, Reject(type(error).__name__, str(error)))
            return None
        finally:
            self.entering -= 1

    async def _let_in(self, connection: ControlConnection) -> Peer | None:
        hello = await connection.receive()
        if not isinstance(hello, Connect):
            raise ProtocolMismatch(f"expected a Connect, got {type(hello).__name__}")
        stranger = None if connection.same_user else Reject("PeerClosed", "expected a process of the same user")
        refusal = stranger or self._admission.refusal(hello)
        if refusal is not None:
            self._refusals.note(f"{hello.name} (pid {hello.pid}): {refusal.reason}")
            await connection.send(refusal)
            return None
        self._admission.check(hello)
        self._admission.granted += 1
        try:
            reader = await self._enter(connection)
            if hello.identity in self._registry.peers:
                raise ProtocolMismatch("expected an identity of its own, got one that was taken meanwhile")
            return self._admission.admit(hello, connection, reader)
        finally:
            self._admission.granted -= 1

    async def _until_disconnected(self, connection: ControlConnection) -> None:
        """Tell a sender that it is let in, and stay with it; it may die at any moment, this one included."""
        with suppress(anyio.BrokenResourceError, anyio.EndOfStream, ProtocolMismatch):
            await connection.send(Ready())
            await connection.receive()

    def _look_for_the_silent(self) -> None:
        """A connection has ended. Whose door is still open has not died: it is given up as if it had."""
        self._registry.drain()
        for peer in list(self._registry.peers.values()):
            if peer.open and self._settled(peer) and not self._registry.reaches(peer):
                peer.unresponsive_s = self._heartbeat_timeout_s
                peer.control.shutdown_read()

    def _settled(self, peer: Peer) -> bool:
        """Whether the ZeroMQ connection of `peer` was there, or has had the time to come."""
        return peer.connected or time.monotonic() - peer.since >= (self._heartbeat_timeout_s or 0)


async def _tell(connection: ControlConnection, refused: Reject) -> None:
    """Say why somebody is not, or no longer, let in, to whoever still listens."""
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError), anyio.move_on_after(REJECT_TIMEOUT_S):
        await connection.send(refused)
