"""The acceptor of a tcp port, where senders of a channel or mirrors of weights join: one ZeroMQ socket, with a key.

ZeroMQ's own handshake proves the key before a byte of a connection reaches this process, except on a link that is not
encrypted: there a session checks the proof in the answer that admits it. ZeroMQ's events report the descriptor of each
connection and its end. They come in order: a descriptor is reported closed before it is reported
open again. So after reading all events, the connection of a message with that descriptor is known, unless it has ended
meanwhile. A peer therefore is admitted when it has answered this side: by then its connection is known to have been
open after its events were read. Messages of a connection that has ended may still come, with the descriptor of a new
one: they do it no harm, because their sender can be sent no answer.

`PendingHandshakes` limits the connections without an admitted peer. Knows neither records nor weights: a `Service`
answers first messages, and each peer is its `Session` from then on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

import anyio
import zmq

from ..._schemas import ProtocolMismatch
from ..._schemas.control import Connect, Message, Ready, Reject, Subscribe, decode
from .heartbeat import CHECKS_PER_TIMEOUT, GRACE_S
from .pending_handshakes import PendingHandshakes
from .rejections import DisconnectOnError, RejectionCounter, rejection_of
from .socket_monitor import ENDS_AND_BEGINNINGS, SocketMonitor
from .tcp_connection import TcpConnection
from .tcp_handshakes import (
    FAILED,
    LARGEST_HANDSHAKE_MESSAGE,
    MOST_OF_HANDSHAKE,
    is_unserved,
    shut_down,
    shut_down_flood,
)
from .transport import EVENTS
from .unread import FRAMING_BYTES, BlockedLoopWatch, Inflow

CLOSE_WAIT_S, FLUSH_S, FLUSH_CHECK_S = 4.0, 5.0, 0.001
"""Bound on the time that peers take to handle the last messages, confirmed by closing; bound on the time that ZeroMQ
takes to send them, and the pause between two checks of that."""

CHECK_INTERVAL_S = 1.0
"""The longest interval between checks for peers that are unresponsive, or have sent too much."""


class Session(Protocol):
    """The peer of a connection, from its first message on: a sender of a channel, or a mirror of weights."""

    inflow: Inflow
    """Bytes of its messages that were handled; set when it is admitted."""
    most_unread: int
    """Bytes of it that may wait to be handled."""
    timeout_s: float | None
    """Seconds without a byte that make it unresponsive."""
    holds_place: bool
    """True if a place is granted to it: it is not among the connections that are too many."""

    @property
    def open(self) -> bool:
        """Return whether it may still send: its bytes are counted, and its silence."""
        ...

    def on_admitted(self, tcp: TcpConnection, answer: Ready) -> None:
        """Begin to serve it: it has answered.

        Raises:
            PenstockError: it may not join any more, or its answer does not prove what it must.
        """
        ...

    def on_message(self, message: Message) -> None:
        """Handle a message of the admitted peer.

        Raises:
            ProtocolMismatch: it may not send it.
        """
        ...

    def on_check(self) -> None:
        """Send what is due at each check of the connections."""
        ...

    def on_error(self, error: Exception) -> None:
        """Disconnect the admitted peer: it has violated the protocol."""
        ...

    def on_unresponsive(self) -> None:
        """Disconnect the admitted peer: it is unresponsive."""
        ...

    def on_end(self, *, damaged: bool) -> None:
        """Release what is held for it: its connection has ended; `damaged` if ZeroMQ ended it for the bytes on it."""
        ...


class Service(Protocol):
    """Serves the peers of a port: answers their first messages, and carries those of all."""

    @property
    def first(self) -> type[Connect | Subscribe]:
        """Return the message that begins a handshake."""
        ...

    def begin(self, connection: Connection, identity: bytes, request: Any) -> tuple[Session, Message] | Reject:
        """Return the session that a `first` begins, and the answer to it; or why it is rejected.

        Raises:
            PenstockError: the same, as an error.
        """
        ...

    def drain(self) -> bool:
        """Handle the messages that have arrived, of each peer as many as it may send; return whether that was all."""
        ...

    def send(self, identity: bytes, message: Message) -> bool:
        """Send a message; return whether its connection exists."""
        ...


class Connection:
    """A connection to the port."""

    def __init__(self, fd: int, port: int) -> None:
        self.fd = fd
        self.host = ""
        """The other side's address, where the kernel still knew it."""
        self.identity = b""
        """The identity of its ZeroMQ socket, once its session has begun."""
        self.session: Session | None = None
        """Of its peer, from the first message on."""
        self.tcp: TcpConnection | None = None
        """Held once its peer is admitted."""
        self.closing = False
        """True once it is about to be closed: its messages are ignored."""
        self._port = port
        with suppress(OSError), TcpConnection(fd) as tcp:
            self.host = tcp.host

    @property
    def unserved(self) -> bool:
        """Return whether bytes of it wait to be read."""
        return is_unserved(self.fd, self.host, self._port)

    @property
    def holds_place(self) -> bool:
        """Return whether a place is granted on it."""
        return self.session is not None and self.session.holds_place

    def exceeds(self, received: int) -> bool:
        """Return whether `received` bytes are more than twice those that may wait. Safe from any thread."""
        session = self.session
        if self.tcp is None or session is None:
            return _exceeds_handshake(received)
        return session.inflow.unread(received) > 2 * session.most_unread


class TcpAcceptor:
    """Admits the peers of a port to its service, and detects when one has closed, died or become unresponsive."""

    def __init__(
        self,
        service: Service,
        socket: zmq.Socket[bytes],
        port: int,
        *,
        rejections: RejectionCounter,
        heartbeat_timeout_s: float | None,
        places: int = 0,
    ) -> None:
        """Accept connections to `port`, where `socket` is bound; the service may grant `places`."""
        self._service = service
        self._socket = socket
        self._port = port
        self._rejections = rejections
        self._loop = asyncio.get_running_loop()
        self._connections: dict[int, Connection] = {}
        """By descriptor."""
        self._handshakes = PendingHandshakes[Connection](places, self._drain, self.drop)
        self._timers: WeakSet[asyncio.TimerHandle] = WeakSet()
        self.closed = False
        self._check_interval_s = (
            CHECK_INTERVAL_S
            if heartbeat_timeout_s is None
            else min(CHECK_INTERVAL_S, heartbeat_timeout_s / CHECKS_PER_TIMEOUT)
        )
        self._monitor = SocketMonitor(socket, ENDS_AND_BEGINNINGS, self._on_event)
        self._call_later(self._check_interval_s, self._check_connections)
        self.watch: BlockedLoopWatch = BlockedLoopWatch(2 * CHECK_INTERVAL_S, self._shut_down_floods)

    def __len__(self) -> int:
        return len(self._connections)

    def __repr__(self) -> str:
        return f"<TcpAcceptor: {len(self)} connections, {len(self._handshakes)} in handshake>"

    # -- the events of connections -----------------------------------------------------------------------------------

    def read_events(self) -> None:
        """Learn of all connections that have begun or ended."""
        self._monitor.read()

    def _on_event(self, event: int, fd: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._on_accepted(fd)
        else:
            self._on_disconnected(fd)

    def _on_accepted(self, fd: int) -> None:
        connection = self._connections[fd] = Connection(fd, self._port)
        self._handshakes.add(connection)

    def _on_disconnected(self, fd: int) -> None:
        connection = self._connections.pop(fd, None)
        if connection is None:
            return
        self._handshakes.remove(connection)
        # ZeroMQ has closed its descriptor; where the connection is not ended, that was for its bytes.
        damaged = connection.tcp is not None and connection.tcp.established
        if connection.session is not None:
            connection.session.on_end(damaged=damaged)
        elif not connection.closing:
            self._rejections.record(FAILED)
        if connection.tcp is not None:
            connection.tcp.close()

    def _drain(self) -> bool:
        emptied = self._service.drain()
        self._monitor.read()
        return emptied

    # -- messages ----------------------------------------------------------------------------------------------------

    def handle(self, identity: bytes, frames: Sequence[zmq.Frame]) -> None:
        """Handle a message of the socket with `identity`."""
        self._monitor.read()
        connection = self._connections.get(int(frames[0].get(zmq.SRCFD)))
        if connection is None or connection.closing:
            self._rejections.record("a message from an unknown peer")
            return
        with DisconnectOnError(self._on_error, connection, identity):
            self._step(connection, identity, frames)

    def _step(self, connection: Connection, identity: bytes, frames: Sequence[zmq.Frame]) -> None:
        # There are four cases:
        #
        # 1. The peer of this connection was admitted: the message is for its session.
        # 2. It answers now: it is admitted.
        # 3. No peer was admitted: one begins. If another one had begun, its connection had the same descriptor.
        # 4. The message is one of a connection that had the same descriptor.
        session = connection.session
        if session is not None and connection.identity == identity:
            if connection.tcp is not None:
                session.inflow.handled += sum(map(len, frames)) + FRAMING_BYTES * len(frames)
                session.on_message(_message(frames))
            elif not isinstance(message := _message(frames), Ready):
                raise ProtocolMismatch(f"expected Ready, got {type(message).__name__}")
            else:
                self._admit(connection, session, message)
        elif connection.tcp is None:
            self._begin(connection, identity, _message(frames))
        else:
            self._rejections.record("a message from an unknown peer")

    def _begin(self, connection: Connection, identity: bytes, message: Message) -> None:
        if not isinstance(message, self._service.first):
            raise ProtocolMismatch(f"expected {self._service.first.__name__}, got {type(message).__name__}")
        begun = self._service.begin(connection, identity, message)
        if isinstance(begun, Reject):
            self.refuse(connection, identity, f"{message.name} (pid {message.pid})", begun)
            return
        session, answer = begun
        if not self._reaches(identity, answer):
            session.on_end(damaged=False)
            return
        if connection.session is not None:
            connection.session.on_end(damaged=False)
        connection.identity, connection.session = identity, session

    def _admit(self, connection: Connection, session: Session, answer: Ready) -> None:
        tcp = TcpConnection(connection.fd)
        try:
            session.on_admitted(tcp, answer)
        except BaseException:
            tcp.close()
            raise
        session.inflow.begin(tcp.bytes_received)
        connection.tcp = tcp
        self._handshakes.remove(connection)

    def _on_error(self, connection: Connection, identity: bytes, error: Exception) -> None:
        if connection.tcp is not None and connection.session is not None:
            connection.session.on_error(error)
        else:
            self.refuse(connection, identity, f"handshake with {connection.host} failed", rejection_of(error), error)

    def refuse(
        self, connection: Connection, identity: bytes, subject: str, rejection: Reject, error: Exception | None = None
    ) -> None:
        """Notify a peer that it is refused, and close its connection when that has had the time to leave.

        Another one may have had a connection with the same descriptor: then this connection is not to blame.
        """
        self._rejections.record(f"{subject}: {rejection.reason}", error)
        if self._reaches(identity, rejection):
            self.close_soon(connection)

    def _reaches(self, identity: bytes, answer: Message) -> bool:
        """Send an answer; return whether its connection exists: a new one may have the descriptor of one that ended."""
        self._socket.getsockopt(EVENTS)  # learn first of connections that have ended
        return self._service.send(identity, answer)

    # -- unresponsive peers, and floods ------------------------------------------------------------------------------

    def _check_connections(self) -> None:
        self._call_later(self._check_interval_s, self._check_connections)
        emptied = self._drain()
        self.watch.beat()
        for connection in list(self._connections.values()):
            if connection.tcp is None or connection.session is None:
                self._check_pending(connection)
            else:
                if connection.session.open:
                    self._check_session(connection.session, connection.tcp, emptied=emptied)
                connection.session.on_check()

    def _check_pending(self, connection: Connection) -> None:
        if shut_down_flood(connection.fd, connection.host, self._port, _exceeds_handshake):
            self.drop(connection, f"a connection from {connection.host} sent too much before it joined")

    def _check_session(self, session: Session, tcp: TcpConnection, *, emptied: bool) -> None:
        received = tcp.bytes_received
        if emptied:
            session.inflow.settle(received)
        if (unread := session.inflow.unread(received)) > session.most_unread:
            what = "of messages that wait, or of one that does not end"
            session.on_error(ProtocolMismatch(f"expected at most {session.most_unread} bytes {what}, got {unread}"))
        elif tcp.unresponsive(session.timeout_s):
            session.on_unresponsive()

    def _shut_down_floods(self) -> None:
        """End connections that have sent more than twice their bound, while the loop is blocked: in a thread."""
        for event, fd in self._monitor.undelivered():
            if event == zmq.EVENT_ACCEPTED:
                shut_down_flood(fd, None, self._port, _exceeds_handshake)
        for connection in list(self._connections.values()):
            shut_down_flood(connection.fd, connection.host, self._port, connection.exceeds)

    # -- the end of connections --------------------------------------------------------------------------------------

    def drop(self, connection: Connection, reason: str) -> None:
        """Count a connection as rejected, and close it at once."""
        self._rejections.record(reason)
        self._shut_down(connection)

    def close_soon(self, connection: Connection) -> None:
        """Ignore a connection from now on, and close it when the messages sent to it have had the time to leave."""
        connection.closing = True
        self._handshakes.remove(connection)
        self._call_later(GRACE_S, partial(self._shut_down, connection))

    def _shut_down(self, connection: Connection) -> None:
        connection.closing = True
        self._handshakes.remove(connection)
        if self._connections.get(connection.fd) is not connection:
            return
        if connection.tcp is not None:
            connection.tcp.shutdown()
        else:
            shut_down(connection.fd, connection.host, self._port)

    def broadcast(self, message: Message) -> None:
        """Send a last message to all peers whose session has begun."""
        for connection in self._connections.values():
            if connection.session is not None:
                self._service.send(connection.identity, message)

    async def aclose(self) -> None:
        """Accept no more peers, and close the ZeroMQ socket when the last messages have left."""
        self.closed = True
        self.watch.close()
        self._monitor.close()
        self._handshakes.close()
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


def _message(frames: Sequence[zmq.Frame]) -> Message:
    if len(frames) != 1:
        raise ProtocolMismatch(f"expected a message in one frame, got {len(frames)}")
    if len(frames[0]) > LARGEST_HANDSHAKE_MESSAGE:
        raise ProtocolMismatch(f"expected a message of at most {LARGEST_HANDSHAKE_MESSAGE} bytes, got {len(frames[0])}")
    return decode(frames[0].buffer)
