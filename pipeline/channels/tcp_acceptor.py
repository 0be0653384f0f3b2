"""The acceptor of the tcp transport: one port, and one ZeroMQ socket, for all messages.

ZeroMQ's own handshake proves the key before a byte of a connection reaches this process, and its events report the
descriptor of each connection and its end. They come in order: a descriptor is reported closed before it is reported
open again. So after reading all events, the connection of a message with that descriptor is known, unless it has ended
meanwhile. A sender therefore is admitted when it has answered the receiver: by then its connection is known to have
been open after its events were read. Messages of a connection that has ended may still come, with the descriptor of a
new one: they cost that one nothing, because their sender can be sent no answer.

A connection that has not sent Connect holds no place. It has `HANDSHAKE_S` to do so; where too many wait, the oldest
one of the address with the most is closed, because an honest one is hardly ever the oldest.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakSet

import anyio
import zmq

from ..._schemas import ProtocolMismatch
from ..._schemas.control import Connect, Message, Ready, Reject, decode
from ..errors import PenstockError
from .heartbeat import CHECKS_PER_TIMEOUT, DAMAGED, GRACE_S, timeout_with
from .message_counts import MessageCounts
from .peer import Peer
from .rejections import DisconnectOnError, rejection_of
from .remote_receiver import ENDED, RemoteReceiver
from .socket_monitor import ENDS_AND_BEGINNINGS, SocketMonitor
from .tcp_connection import TcpConnection
from .tcp_handshakes import (
    FAILED,
    LARGEST_HANDSHAKE_MESSAGE,
    MOST_OF_HANDSHAKE,
    SETTLED_S,
    excess,
    is_unserved,
    shut_down,
    shut_down_flood,
)
from .transport import EVENTS, HANDSHAKE_S, MAX_HANDSHAKES, Frames, PayloadReader
from .unread import BlockedLoopWatch

CLOSE_WAIT_S, FLUSH_S, FLUSH_CHECK_S = 4.0, 5.0, 0.001
"""Bound on the time in which senders handle the last messages, which they confirm by closing; bound on the time in
which ZeroMQ sends them, and the pause between two checks of that."""

CHECK_INTERVAL_S = 1.0
"""The longest interval between checks for senders that are unresponsive, or have sent too much."""


class _Connection:
    """A connection to the port: a `PeerControl` once its sender is admitted."""

    def __init__(self, acceptor: TcpAcceptor, fd: int) -> None:
        self.fd = fd
        self.since_s = time.monotonic()
        self.host = ""
        """The other side's address, where the kernel still knew it."""
        self.identity = b""
        """The identity of its ZeroMQ socket, once it has sent Connect."""
        self.request: Connect | None = None
        """Its Connect, from the grant of a place until it is admitted."""
        self.peer: Peer | None = None
        """The sender that was admitted on it."""
        self.tcp: TcpConnection | None = None
        """Held once its sender is admitted."""
        self.timeout_s: float | None = None
        """Seconds without a byte after which its sender is unresponsive."""
        self.closing = False
        """Whether it is about to be closed."""
        self.deadline: asyncio.TimerHandle | None = None
        self._acceptor = acceptor

    @property
    def unserved(self) -> bool:
        return is_unserved(self.fd, self.host, self._acceptor.port)

    async def send(self, message: Message) -> None:
        self._acceptor.receiver.send(self.identity, message)

    def shutdown_read(self) -> None:
        self._acceptor.shutdown_soon(self)


class TcpAcceptor:
    """Accepts senders at a receiver's socket, and detects when one has closed, died or become unresponsive."""

    def __init__(
        self,
        receiver: RemoteReceiver[Any],
        socket: zmq.Socket[bytes],
        reader: PayloadReader,
        port: int,
    ) -> None:
        self.receiver = receiver
        receiver.on_unknown = self._on_unknown
        self._admission, self._rejections = receiver.admission, receiver.rejections
        self._socket = socket
        self._reader = reader
        self.port = port
        self._most_unread = receiver.most_waiting.nbytes
        """Bytes of a sender that may wait to be handled: those within its credit, and other messages."""
        self._heartbeat_timeout_s = receiver.config.heartbeat_timeout_s
        self._loop = asyncio.get_running_loop()
        self._connections: dict[int, _Connection] = {}
        """By descriptor, the oldest first."""
        self._timers: WeakSet[asyncio.TimerHandle] = WeakSet()
        self._limit_scheduled = False
        """Whether a count of the connections in handshake is scheduled."""
        self._ending = 0
        """Senders whose connection has ended, and whose end is scheduled."""
        self._closed = False
        self._check_interval_s = (
            CHECK_INTERVAL_S
            if self._heartbeat_timeout_s is None
            else min(CHECK_INTERVAL_S, self._heartbeat_timeout_s / CHECKS_PER_TIMEOUT)
        )
        self._monitor = SocketMonitor(socket, ENDS_AND_BEGINNINGS, self._on_event)
        self._call_later(self._check_interval_s, self._check_connections)
        self.watch: BlockedLoopWatch = BlockedLoopWatch(2 * CHECK_INTERVAL_S, self._shut_down_floods)

    def __repr__(self) -> str:
        waiting = sum(connection.peer is None for connection in self._connections.values())
        return f"<TcpAcceptor: {waiting} in handshake, {self._admission!r}>"

    # -- the events of connections -----------------------------------------------------------------------------------

    def _on_event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._on_accepted(value)
        else:
            self._on_disconnected(value)

    @property
    def _most_pending(self) -> int:
        return self._admission.max_senders + MAX_HANDSHAKES

    def _on_accepted(self, fd: int) -> None:
        connection = self._connections[fd] = _Connection(self, fd)
        self._set_deadline(connection)
        with suppress(OSError), TcpConnection(fd) as tcp:
            connection.host = tcp.host
        if not self._limit_scheduled and len(self._connections) > self._most_pending:
            self._limit_scheduled = True
            self._loop.call_soon(self._limit_handshakes)

    def _on_disconnected(self, fd: int) -> None:
        connection = self._connections.pop(fd, None)
        if connection is None:
            return
        if connection.deadline is not None:
            connection.deadline.cancel()
        if connection.peer is not None:
            self._ending += 1
            self._loop.call_soon(self._on_peer_disconnect, connection, connection.peer)
        elif not (connection.identity or connection.closing):
            self._rejections.record(FAILED)
        elif connection.request is not None:
            self._admission.granted -= 1
            self._loop.call_soon(self.receiver.drain)  # the stream may have waited only for it

    def _on_peer_disconnect(self, connection: _Connection, peer: Peer) -> None:
        if self.receiver.peers.get(peer.identity) is peer and not self._closed:
            # ZeroMQ has closed its descriptor; where the connection is not ended, that was for what came on it.
            damaged = connection.tcp is not None and connection.tcp.established
            self.receiver.on_disconnect(peer, DAMAGED if damaged else ENDED)
        self._ending -= 1  # only now: taking it off drains the socket, where a Connect may wait
        if connection.tcp is not None:
            connection.tcp.close()

    def _set_deadline(self, connection: _Connection) -> None:
        """Close a connection that has not joined within `HANDSHAKE_S` from now."""
        due_s = self._loop.time() + HANDSHAKE_S
        connection.deadline = self._call_later(HANDSHAKE_S, lambda: self._expired(connection, due_s))

    def _expired(self, connection: _Connection, due_s: float) -> None:
        late = self._loop.time() - due_s > SETTLED_S
        self.receiver.drain()
        if connection.peer is None and (late or connection.unserved):
            self._set_deadline(connection)  # the time in which this port did not get to it is not its peer's
        elif connection.peer is None:
            self._drop(connection, f"a connection from {connection.host} sent no Connect for {HANDSHAKE_S} s")

    def _limit_handshakes(self) -> None:
        """Close the oldest connections of the address with the most, where too many have sent no Connect."""
        self._limit_scheduled = False
        if self._closed:
            return
        self.receiver.drain()  # a connection whose Connect has arrived does not count
        self._monitor.read()
        pending = [
            connection
            for connection in self._connections.values()
            if connection.request is None and connection.peer is None and not connection.closing
        ]
        for connection in excess(pending, self._most_pending):
            self._drop(connection, f"too many connections from {connection.host} send no Connect")

    def _drop(self, connection: _Connection, reason: str) -> None:
        self._rejections.record(reason)
        self._shutdown(connection)

    # -- handshakes --------------------------------------------------------------------------------------------------

    def _on_unknown(self, identity: bytes, frames: Frames) -> None:
        """Take a step of a handshake."""
        self._monitor.read()
        if self._ending:  # a member that was restarted returns once its former connection is taken off
            self._loop.call_soon(self._take, identity, frames)
        else:
            self._take(identity, frames)

    def _take(self, identity: bytes, frames: Frames) -> None:
        connection = self._connections.get(int(frames[0].get(zmq.SRCFD)))
        if connection is None or connection.closing or connection.peer is not None:
            self._rejections.record("a message from an unknown peer")
            return
        with DisconnectOnError(self._fail_handshake, connection, identity):
            self._handshake_step(connection, identity, _handshake_message(frames))

    def _fail_handshake(self, connection: _Connection, identity: bytes, error: Exception) -> None:
        self._reject(connection, identity, rejection_of(error), "handshake failed: ", error)

    def _handshake_step(self, connection: _Connection, identity: bytes, message: Message) -> None:
        if isinstance(message, Connect) and identity != connection.identity:
            self._handshake(connection, identity, message)
        elif isinstance(message, Ready) and identity == connection.identity and connection.request is not None:
            self._admit(connection, connection.request)
        else:
            raise ProtocolMismatch(f"expected a Connect, got {type(message).__name__}")

    def _handshake(self, connection: _Connection, identity: bytes, request: Connect) -> None:
        if request.identity != identity:
            raise ProtocolMismatch("expected a Connect with the sender's own identity, got another")
        rejection = self._admission.rejection(request)
        if rejection is not None:
            self._reject(connection, identity, rejection, f"{request.name} (pid {request.pid}): ")
            return
        self.receiver.check(request)
        if self._reaches(identity, self.receiver.accept_message("", 0)):
            self._forget_request(connection)
            connection.identity, connection.request = identity, request
            self._admission.granted += 1

    def _forget_request(self, connection: _Connection) -> None:
        """Free the place that was granted, if one was."""
        if connection.request is not None:
            connection.request = None
            self._admission.granted -= 1

    def _admit(self, connection: _Connection, request: Connect) -> None:
        self._forget_request(connection)
        tcp = TcpConnection(connection.fd)
        try:
            connection.peer = self.receiver.admit(request, connection, self._reader)
        except PenstockError:
            tcp.close()
            raise
        connection.tcp = tcp
        connection.peer.inflow.begin(tcp.bytes_received)
        connection.timeout_s = timeout_with(request.ping_s, self._heartbeat_timeout_s)
        self.receiver.send(connection.identity, Ready())
        connection.peer.counts = MessageCounts()

    def _reject(
        self,
        connection: _Connection,
        identity: bytes,
        rejection: Reject,
        subject: str,
        error: Exception | None = None,
    ) -> None:
        self._rejections.record(f"{subject}{rejection.reason}", error)
        if self._reaches(identity, rejection):
            self.shutdown_soon(connection)

    def _reaches(self, identity: bytes, answer: Message) -> bool:
        """Send an answer; return whether its connection exists: a new one may have the descriptor of one that ended."""
        self._socket.getsockopt(EVENTS)  # learn first of connections that have ended
        return self.receiver.send(identity, answer)

    # -- unresponsive senders, and floods ----------------------------------------------------------------------------

    def _check_connections(self) -> None:
        self._call_later(self._check_interval_s, self._check_connections)
        emptied = self.receiver.drain()
        self._monitor.read()
        self.watch.beat()
        if len(self._connections) > self._most_pending:
            self._limit_handshakes()
        for connection in list(self._connections.values()):
            if connection.peer is None or connection.tcp is None:
                self._check_pending(connection)
            else:
                if connection.peer.open:
                    self._check_sender(connection, connection.peer, connection.tcp, emptied=emptied)
                self.receiver.answer_count(connection.peer)

    def _check_pending(self, connection: _Connection) -> None:
        if shut_down_flood(connection.fd, connection.host, self.port, _exceeds_handshake):
            self._drop(connection, f"a connection from {connection.host} sent too much before it joined")

    def _check_sender(self, connection: _Connection, peer: Peer, tcp: TcpConnection, *, emptied: bool) -> None:
        received = tcp.bytes_received
        if emptied:
            peer.inflow.settle(received)
        if (unread := peer.inflow.unread(received)) > self._most_unread:
            what = "of messages that wait, or of one that does not end"
            self.receiver.disconnect_for_error(
                peer, ProtocolMismatch(f"expected at most {self._most_unread} bytes {what}, got {unread}")
            )
        elif tcp.unresponsive(connection.timeout_s):
            self._timeout(connection, peer)

    def _shut_down_floods(self) -> None:
        """End connections that have sent more than twice what they may, while the loop is blocked: in a thread."""
        for event, fd in self._monitor.undelivered():
            if event == zmq.EVENT_ACCEPTED:
                shut_down_flood(fd, None, self.port, _exceeds_handshake)
        for connection in list(self._connections.values()):
            peer = connection.peer
            exceeds = _exceeds_handshake if peer is None else partial(self._exceeds_twice, peer)
            shut_down_flood(connection.fd, connection.host, self.port, exceeds)

    def _exceeds_twice(self, peer: Peer, received: int) -> bool:
        return peer.inflow.unread(received) > 2 * self._most_unread

    def _timeout(self, connection: _Connection, peer: Peer) -> None:
        peer.unresponsive_s = connection.timeout_s
        rejection = self.receiver.on_disconnect(peer)
        if rejection is not None:
            self.receiver.send(peer.identity, rejection)
        self.shutdown_soon(connection)

    # -- the end of connections --------------------------------------------------------------------------------------

    def shutdown_soon(self, connection: _Connection) -> None:
        """Close a connection, when the messages sent to it have had the time to leave."""
        connection.closing = True
        self._call_later(GRACE_S, lambda: self._shutdown(connection))

    def _shutdown(self, connection: _Connection) -> None:
        connection.closing = True
        if self._connections.get(connection.fd) is not connection:
            return
        if connection.tcp is not None:
            connection.tcp.shutdown()
        else:
            shut_down(connection.fd, connection.host, self.port)

    async def aclose(self) -> None:
        """Accept no more senders, and close the ZeroMQ socket when the last messages have left."""
        self._closed = True
        self.watch.close()
        self._monitor.close()
        for timer in self._timers:
            timer.cancel()
        self._socket.close()
        held = [connection.tcp for connection in self._connections.values() if connection.tcp is not None]
        try:
            with anyio.move_on_after(FLUSH_S):
                while any(tcp.held for tcp in held):  # noqa: ASYNC110 (ZeroMQ reports no end of a connection after that of its socket)
                    await anyio.sleep(FLUSH_CHECK_S)
                async with anyio.create_task_group() as tasks:
                    for tcp in held:
                        tasks.start_soon(tcp.finish, CLOSE_WAIT_S)
        finally:
            for tcp in held:
                tcp.close()
            self._connections.clear()

    def _call_later(self, delay_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        timer = self._loop.call_later(delay_s, call)
        self._timers.add(timer)
        return timer


def _exceeds_handshake(received: int) -> bool:
    return received > MOST_OF_HANDSHAKE


def _handshake_message(frames: Frames) -> Message:
    if len(frames) != 1 or len(frames[0]) > LARGEST_HANDSHAKE_MESSAGE:
        raise ProtocolMismatch(
            f"expected a handshake message of at most {LARGEST_HANDSHAKE_MESSAGE} bytes in one frame"
        )
    return decode(frames[0].buffer)
