"""The acceptor of the shm transport: it admits or rejects each sender, and watches it until it disconnects.

A peer may be of another program, or hostile: `PendingHandshakes` limits the connections without an admitted peer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias
from weakref import WeakSet

import anyio
import zmq
from anyio.abc import Listener, SocketStream

from ..._schemas import ProtocolMismatch
from ..._schemas.control import Connect, CreditGrant, Ready, Reject
from ..errors import PeerClosed
from .control_connection import ControlConnection, serve_control
from .heartbeat import GRACE_S
from .peer import Peer
from .peers import Peers
from .pending_handshakes import PendingHandshakes
from .rejections import DisconnectOnError, rejection_of
from .socket_monitor import SocketMonitor
from .transport import PayloadReader

REJECT_TIMEOUT_S = 1.0
"""Bound on sending a rejection: it is short, so that only a peer that does not read fails to get it."""

Enter: TypeAlias = Callable[[ControlConnection], Awaitable[PayloadReader]]
"""Completes a handshake: receives the segment of the sender."""


@dataclass(slots=True, eq=False)
class _Handshake:
    """A connection whose sender has not joined."""

    connection: ControlConnection
    host: str = "this host"
    holds_place: bool = False
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    ended_for: str = ""
    """The reason of its end, in words for its peer."""

    @property
    def unserved(self) -> bool:
        return self.connection.unread > 0

    def end(self, reason: str) -> None:
        self.ended_for = reason
        self.scope.cancel()


class ShmAcceptor:
    """Accepts senders over control connections, and detects when one has closed, died or become unresponsive."""

    def __init__(self, peers: Peers, socket: zmq.Socket[bytes], listener: Listener[SocketStream], enter: Enter) -> None:
        self._peers = peers
        self._attendance, self._rejections = peers.attendance, peers.rejections
        self._socket = socket
        self._listener = listener
        self._enter = enter
        self._heartbeat_timeout_s = peers.config.heartbeat_timeout_s
        self._handshakes = PendingHandshakes[_Handshake](peers.config.max_senders, lambda: None, _Handshake.end)
        self._loop = asyncio.get_running_loop()
        self._timers: WeakSet[asyncio.TimerHandle] = WeakSet()
        """Checks for senders whose ZeroMQ connection has ended, or was not made in time."""
        self._monitor: SocketMonitor | None = None
        """Reports that a ZeroMQ connection has ended, without naming it."""
        if self._heartbeat_timeout_s is not None:
            self._monitor = SocketMonitor(socket, zmq.EVENT_DISCONNECTED, lambda *_: self._check_in(GRACE_S))
        self._accept_task = self._loop.create_task(self._serve(), name="penstock shm acceptor")

    def __repr__(self) -> str:
        return f"<ShmAcceptor: {len(self._handshakes)} in handshake, {self._attendance!r}>"

    async def aclose(self) -> None:
        """Accept no more senders, and close the ZeroMQ socket."""
        if self._monitor is not None:
            self._monitor.close()
        self._handshakes.close()
        for timer in self._timers:
            timer.cancel()
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
            await serve_control(self._listener, self._accept, self._rejections)

    async def _accept(self, connection: ControlConnection) -> None:
        handshake = _Handshake(connection)
        self._handshakes.add(handshake)
        try:
            peer = await self._handshake(handshake)
        finally:
            self._handshakes.remove(handshake)
        if peer is not None:
            with DisconnectOnError(self._peers.disconnect_for_error, peer):
                await self._until_disconnected(connection)
            if (rejection := self._peers.on_disconnect(peer)) is not None:
                await _send_rejection(connection, rejection)

    async def _handshake(self, handshake: _Handshake) -> Peer | None:
        try:
            with handshake.scope:
                return await self._admit(handshake)
            self._rejections.record(handshake.ended_for)
            await _send_rejection(handshake.connection, Reject(PeerClosed.__name__, handshake.ended_for))
        except Exception as error:  # noqa: BLE001 (whatever these bytes cause, they cost this connection alone)
            self._rejections.record(f"handshake failed: {type(error).__name__}: {error}", error)
            await _send_rejection(handshake.connection, rejection_of(error))
        return None

    async def _admit(self, handshake: _Handshake) -> Peer | None:
        connection = handshake.connection
        request = await connection.receive()
        if not isinstance(request, Connect):
            raise ProtocolMismatch(f"expected a Connect, got {type(request).__name__}")
        other_user = None if connection.same_user else Reject("PeerClosed", "expected a process of the same user")
        rejection = other_user or self._attendance.rejection(request)
        if rejection is not None:
            self._rejections.record(f"{request.name} (pid {request.pid}): {rejection.reason}")
            await connection.send(rejection)
            return None
        self._attendance.check(request)
        self._attendance.granted += 1
        handshake.holds_place = True
        try:
            reader = await self._enter(connection)
            if request.identity in self._peers.admitted:
                raise ProtocolMismatch("expected an identity of its own, got one that was taken meanwhile")
            peer = self._peers.admit(request, connection, reader)
        except (anyio.BrokenResourceError, anyio.EndOfStream):  # a sender that was granted its place, and stopped
            return None
        finally:
            self._attendance.granted -= 1
        if self._heartbeat_timeout_s is not None:
            self._check_in(self._heartbeat_timeout_s)  # by then its ZeroMQ connection must exist
        return peer

    async def _until_disconnected(self, connection: ControlConnection) -> None:
        """Send a sender that it is admitted, and wait for its end; it may die at any moment, this one included."""
        with suppress(anyio.BrokenResourceError, anyio.EndOfStream):
            await connection.send(Ready())
            await connection.receive()

    def _check_in(self, delay_s: float) -> None:
        self._timers.add(self._loop.call_later(delay_s, self._disconnect_unresponsive))

    def _disconnect_unresponsive(self) -> None:
        """Disconnect the senders that have no ZeroMQ connection, but a control connection: they did not die."""
        self._peers.drain()
        for peer in list(self._peers):
            if peer.open and self._settled(peer) and not self._reaches(peer):
                peer.unresponsive_s = self._heartbeat_timeout_s
                peer.control.shutdown_read()

    def _reaches(self, peer: Peer) -> bool:
        """Return whether it has a ZeroMQ connection: only sending shows it, so an empty grant is sent."""
        return self._peers.send(peer.identity, CreditGrant(()))

    def _settled(self, peer: Peer) -> bool:
        """Return whether the ZeroMQ connection of `peer` existed, or has had the time to be made."""
        return peer.connected or time.monotonic() - peer.admitted_s >= (self._heartbeat_timeout_s or 0)


async def _send_rejection(connection: ControlConnection, rejection: Reject) -> None:
    """Send a peer the reason why it is not, or no longer, admitted, if it still receives."""
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError), anyio.move_on_after(REJECT_TIMEOUT_S):
        await connection.send(rejection)
