"""Lets senders in over tcp: one port, and one ZeroMQ socket, for everything that is said.

ZeroMQ's own handshake proves the key before a byte of a connection reaches this process, and its events tell which
descriptor a connection has and when it ends. They come in order: a descriptor is told closed before it is told open
again. So whoever reads all events first knows which connection a message with that descriptor came by, but for one
that has ended meanwhile. A sender therefore counts as in when it has answered what was said to it: by then its
connection is known to have been open after its events were read.

A connection that has not introduced itself holds no place. It has `HANDSHAKE_S` to do so; where too many wait, the
oldest one of the address with the most is cut, for an honest one is hardly ever the oldest.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress

import anyio
import zmq

from ..._schemas import ProtocolMismatch
from ..._schemas.control import Accept, Connect, Message, Ready, Reject, decode
from ..errors import PenstockError
from .admission import Admission, RejectionCounter
from .heartbeat import CHECKS_PER_TIMEOUT, GRACE_S
from .peer import Peer
from .registry import Registry
from .socket_monitor import SocketMonitor
from .tcp_connection import TcpConnection
from .transport import HANDSHAKE_S, Frames, PayloadReader

__all__ = ["TcpAcceptor"]

MOST_NEWCOMERS = 64
"""Connections that may wait to introduce themselves, beside those of as many senders as may come."""

LARGEST_INTRODUCTION = 64 * 1024
"""Bytes: what is said in a handshake is short."""

HEAR_S, FLUSH_S, FLUSH_LOOK_S = 4.0, 5.0, 0.001
"""How long senders may take to hear what was said last, which they answer by closing; how long it may take in all, and
how often is looked whether ZeroMQ has sent it."""

LOOK_S = 1.0
"""How often is looked, at the least, for senders that send without end."""

_WATCHED = int(
    zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class _Connection:
    """A connection to the port: a `PeerControl` from the moment that its sender is let in."""

    def __init__(self, acceptor: TcpAcceptor, fd: int) -> None:
        self.fd = fd
        self.host = ""
        """The other side's address, where the kernel still knew it."""
        self.identity = b""
        """Of its ZeroMQ socket, once it has introduced itself."""
        self.hello: Connect | None = None
        """What it said when it was granted a place."""
        self.peer: Peer | None = None
        """The sender that was let in by it."""
        self.tcp: TcpConnection | None = None
        """Held from the moment that its sender is let in."""
        self.heard = self.received = 0
        """Messages that had been heard by it, and bytes that had come by it, when a message came last."""
        self.quiet_looks = 0
        """How often in a row it was found silent."""
        self.refused = False
        """Whether it is about to be cut."""
        self.deadline: asyncio.TimerHandle | None = None
        self._acceptor = acceptor

    async def send(self, message: Message) -> None:
        self._acceptor.send(self.identity, message)

    def shutdown_read(self) -> None:
        self._acceptor.cut_soon(self)


class TcpAcceptor:
    """Serves the bound socket of a receiver: an `Acceptor`."""

    def __init__(
        self,
        registry: Registry,
        socket: zmq.Socket[bytes],
        *,
        welcome: Callable[[], Accept],
        reader: Callable[[], PayloadReader],
        port: int,
        most_unread: int,
        heartbeat_timeout_s: float | None,
    ) -> None:
        self._registry = registry
        self._admission: Admission[Peer] = registry.admission
        self._refusals: RejectionCounter = registry.refusals
        self._socket = socket
        self._welcome = welcome
        self._reader = reader
        self._port = port
        self._most_unread = most_unread
        """Bytes that one message may take."""
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._loop = asyncio.get_running_loop()
        self._connections: dict[int, _Connection] = {}
        """By descriptor, the oldest first."""
        self._timers: set[asyncio.TimerHandle] = set()
        self._bounding = False
        """Whether newcomers are about to be counted."""
        self._closed = False
        self._look_s = LOOK_S if heartbeat_timeout_s is None else min(LOOK_S, heartbeat_timeout_s / CHECKS_PER_TIMEOUT)
        self._monitor = SocketMonitor(socket, _WATCHED, self._heard)
        self._later(self._look_s, self._look)

    def __repr__(self) -> str:
        waiting = sum(connection.peer is None for connection in self._connections.values())
        return f"<TcpAcceptor: {waiting} entering, {self._admission!r}>"

    def send(self, identity: bytes, message: Message) -> None:
        """Send to a connection that has said its identity."""
        self._registry.send(identity, message)

    # -- connections come and go -------------------------------------------------------------------------------------

    def _heard(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._accepted(value)
        elif event == zmq.EVENT_DISCONNECTED:
            self._disconnected(value)
        else:
            self._refusals.note("a handshake failed: the other side has another key, none, or is no penstock")

    def _accepted(self, fd: int) -> None:
        connection = self._connections[fd] = _Connection(self, fd)
        connection.deadline = self._later(HANDSHAKE_S, lambda: self._expired(connection))
        with suppress(OSError), TcpConnection(fd) as tcp:
            connection.host = tcp.host
        if not self._bounding and len(self._connections) > self._admission.most + MOST_NEWCOMERS:
            self._bounding = True
            self._loop.call_soon(self._bound_newcomers)

    def _disconnected(self, fd: int) -> None:
        connection = self._connections.pop(fd, None)
        if connection is None:
            return
        if connection.deadline is not None:
            self._cancel(connection.deadline)
        if connection.peer is not None:
            self._loop.call_soon(self._peer_gone, connection, connection.peer)
        elif connection.hello is not None:
            self._admission.granted -= 1
            self._loop.call_soon(self._registry.drain)  # the stream may have waited for it alone

    def _peer_gone(self, connection: _Connection, peer: Peer) -> None:
        if self._registry.peers.get(peer.identity) is peer and not self._closed:
            self._registry.gone(peer)
        if connection.tcp is not None:
            connection.tcp.close()

    def _expired(self, connection: _Connection) -> None:
        self._registry.drain()
        if connection.peer is None:
            self._reject(connection, f"a connection from {connection.host} did not introduce itself in {HANDSHAKE_S} s")

    def _bound_newcomers(self) -> None:
        """Cut the oldest ones of those that have not introduced themselves, of the address that has the most."""
        self._bounding = False
        if self._closed:
            return
        self._registry.drain()  # who has said who it is does not count
        self._monitor.read()
        waiting: defaultdict[str, deque[_Connection]] = defaultdict(deque)
        for connection in self._connections.values():
            if connection.hello is None and connection.peer is None and not connection.refused:
                waiting[connection.host].append(connection)
        excess = sum(map(len, waiting.values())) - self._admission.most - MOST_NEWCOMERS
        for _ in range(excess):
            host, connections = max(waiting.items(), key=lambda entry: len(entry[1]))
            self._reject(connections.popleft(), f"too many connections from {host} do not introduce themselves")

    def _reject(self, connection: _Connection, reason: str) -> None:
        self._refusals.note(reason)
        self._cut(connection)

    # -- introductions -----------------------------------------------------------------------------------------------

    def handle_unknown(self, identity: bytes, frames: Frames) -> None:
        """Take a step of a handshake; see `Acceptor.handle_unknown`."""
        self._monitor.read()
        connection = self._connections.get(int(frames[0].get(zmq.SRCFD)))
        if connection is None or connection.refused or connection.peer is not None:
            self._refusals.note("a message from a stranger")
            return
        try:
            self._step(connection, identity, _introduction(frames))
        except (PenstockError, OSError) as error:
            self._refuse(connection, identity, Reject(type(error).__name__, str(error)), "introduction failed: ")

    def _step(self, connection: _Connection, identity: bytes, said: Message) -> None:
        if isinstance(said, Connect) and identity != connection.identity:
            self._handshake(connection, identity, said)
        elif isinstance(said, Ready) and identity == connection.identity and connection.hello is not None:
            self._admit(connection, connection.hello)
        else:
            raise ProtocolMismatch(f"expected a Connect, got {type(said).__name__}")

    def _handshake(self, connection: _Connection, identity: bytes, hello: Connect) -> None:
        if hello.identity != identity:
            raise ProtocolMismatch("expected a sender to say its own identity, got another")
        if connection.hello is not None:  # of one that has ended: this descriptor is another's now
            connection.hello = None
            self._admission.granted -= 1
        refusal = self._admission.refusal(hello)
        if refusal is not None:
            self._refuse(connection, identity, refusal, f"{hello.name} (pid {hello.pid}): ")
            return
        self._admission.check(hello)
        connection.identity, connection.hello = identity, hello
        self._admission.granted += 1
        self.send(identity, self._welcome())

    def _admit(self, connection: _Connection, hello: Connect) -> None:
        self._admission.granted -= 1
        connection.hello = None
        tcp = TcpConnection(connection.fd)
        try:
            connection.peer = self._admission.admit(hello, connection, self._reader())
        except PenstockError:
            tcp.close()
            raise
        connection.tcp = tcp
        self.send(connection.identity, Ready())

    def _refuse(self, connection: _Connection, identity: bytes, refusal: Reject, who: str) -> None:
        self._refusals.note(f"{who}{refusal.reason}")
        self.send(identity, refusal)
        self.cut_soon(connection)

    def admitted(self) -> None:
        """Do nothing: a sender that was let in has its connection; see `Acceptor.admitted`."""

    # -- the silent, and those who never stop ------------------------------------------------------------------------

    def _look(self) -> None:
        self._later(self._look_s, self._look)
        self._registry.drain()
        self._monitor.read()
        for connection in list(self._connections.values()):
            peer, tcp = connection.peer, connection.tcp
            if peer is None or tcp is None or not peer.open:
                continue
            if self._endless(connection, peer, tcp):
                self._registry.expel(peer, ProtocolMismatch(f"a message of more than {self._most_unread} bytes"))
            elif self._silent(connection, tcp):
                self._timeout(connection, peer)

    def _endless(self, connection: _Connection, peer: Peer, tcp: TcpConnection) -> bool:
        """Whether more has come than any message takes, and none was complete: it has parts without end."""
        if peer.heard != connection.heard:
            connection.heard, connection.received = peer.heard, tcp.bytes_received
        return tcp.bytes_received - connection.received > self._most_unread

    def _silent(self, connection: _Connection, tcp: TcpConnection) -> bool:
        """Whether nothing came for too long: twice in a row, for this process may have been what stood still."""
        silent = self._heartbeat_timeout_s is not None and tcp.silent_s >= self._heartbeat_timeout_s
        connection.quiet_looks = connection.quiet_looks + 1 if silent else 0
        return connection.quiet_looks > 1

    def _timeout(self, connection: _Connection, peer: Peer) -> None:
        peer.unresponsive_s = self._heartbeat_timeout_s
        refused = self._registry.gone(peer)
        if refused is not None:
            self.send(peer.identity, refused)
        self.cut_soon(connection)

    # -- the end of connections --------------------------------------------------------------------------------------

    def cut_soon(self, connection: _Connection) -> None:
        """End a connection, when what was said to it has had the time to go out."""
        connection.refused = True
        self._later(GRACE_S, lambda: self._cut(connection))

    def _cut(self, connection: _Connection) -> None:
        connection.refused = True
        if self._connections.get(connection.fd) is not connection:
            return
        if connection.tcp is not None:
            connection.tcp.cut()
            return
        with suppress(OSError), TcpConnection(connection.fd) as tcp:
            if tcp.local_port == self._port and tcp.host == connection.host:
                tcp.cut()

    async def aclose(self) -> None:
        """See `Acceptor.aclose`."""
        self._closed = True
        self._monitor.close()
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._socket.close()
        held = [connection.tcp for connection in self._connections.values() if connection.tcp is not None]
        try:
            with anyio.move_on_after(FLUSH_S):
                while any(tcp.held for tcp in held):  # noqa: ASYNC110 (ZeroMQ tells of no end after its socket's own)
                    await anyio.sleep(FLUSH_LOOK_S)
                async with anyio.create_task_group() as tasks:
                    for tcp in held:
                        tasks.start_soon(tcp.finish, HEAR_S)
        finally:
            for tcp in held:
                tcp.close()
            self._connections.clear()

    def _later(self, delay_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        def run() -> None:
            self._timers.discard(timer)
            call()

        timer = self._loop.call_later(delay_s, run)
        self._timers.add(timer)
        return timer

    def _cancel(self, timer: asyncio.TimerHandle) -> None:
        timer.cancel()
        self._timers.discard(timer)


def _introduction(frames: Frames) -> Message:
    if len(frames) != 1 or len(frames[0]) > LARGEST_INTRODUCTION:
        raise ProtocolMismatch(f"expected an introduction of at most {LARGEST_INTRODUCTION} bytes in one frame")
    return decode(frames[0].buffer)
