"""A sender's connection over tcp: everything goes through its one ZeroMQ socket, and ends with it.

Connects in steps, so that each failure of a connection has its own reason.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import anyio
import zmq

from ..._schemas.control import Message, decode, encode
from ..errors import NobodyListens, PeerClosed, PeerLost
from ..util.waiting import Waiters
from .handshake import handshake_timeout
from .heartbeat import DAMAGED, UNRESPONSIVE, ping
from .pending_handshakes import SETTLED_S
from .socket_monitor import SocketMonitor
from .tcp_address import TcpAddress, bracketed
from .tcp_connection import TcpConnection
from .transport import EVENTS, POLLIN, POLLOUT, dealer

ADDRESS_S = 5.0
"""Bound on the attempt at one of several addresses of a host."""

NEVER_MS = 2**31 - 1
"""The delay until ZeroMQ would reconnect: longer than a run. If it must not reconnect at all, it discards received
messages when a connection ends; if it waits, without a connection meanwhile (`ZMQ_IMMEDIATE`), they come first."""

UNNOTICED_S = 10.0
"""Bound on the time until ZeroMQ's thread notices that its connection was ended here: microseconds, on an idle host."""

NO_CONNECTION = "is its process stopped, or does a firewall drop what is sent there?"
NO_HANDSHAKE = "is its process stopped or too busy, or does a program other than penstock listen there?"

OTHER_KEY = ": has it the same key?"
TOO_BUSY = " after {:.0f} s: it is too busy to complete one, or has another key; connect again"
"""A port refuses another key at once, and closes a connection that it got to too late no sooner than `SETTLED_S`."""

_WATCHED = int(
    zmq.EVENT_CONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
)  # not its failures: see `ENDS_AND_BEGINNINGS`


class TcpControl:
    """One connection to a receiver: a `Conversation`, then a `SenderControl`."""

    def __init__(self, socket: zmq.Socket[bytes], connection: TcpConnection, heartbeat_timeout_s: float | None) -> None:
        self.socket = socket
        self._connection = connection
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._ended = anyio.Event()
        self._changed = Waiters()
        """Wakes the task that receives: sending may hide that a message has arrived."""

    async def send(self, message: Message) -> None:
        """Send `message`; see `Conversation.send`."""
        try:
            self.socket.send(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            raise anyio.BrokenResourceError from None
        finally:
            self._changed.wake_all()

    async def receive(self) -> Message:
        """Return the next message; see `Conversation.receive`."""
        while not (events := int(self.socket.getsockopt(EVENTS))) & POLLIN:
            if not events & POLLOUT:
                raise anyio.EndOfStream
            await self._wait()
        return decode(self.socket.recv(zmq.NOBLOCK, copy=False).buffer)

    async def _wait(self) -> None:
        loop, fd = asyncio.get_running_loop(), int(self.socket.getsockopt(zmq.FD))
        loop.add_reader(fd, self._changed.wake_all)
        try:
            await self._changed.wait()
        finally:
            loop.remove_reader(fd)

    async def next_event(self, receiver: str) -> PeerLost:
        """See `SenderControl.next_event`: all messages arrive on the ZeroMQ socket, so the end is the only event.

        The connection is ended at once: a closing receiver waits for that.
        """
        await self._ended.wait()
        lost = PeerLost(f"{receiver}, the receiver, {self._how_it_ended()}")
        self._connection.shutdown()
        return lost

    def _how_it_ended(self) -> str:
        # There are three cases:
        #
        # 1. The other side closed the connection, or the kernel gave it up.
        # 2. ZeroMQ closed it here, after a time in which no byte arrived.
        # 3. ZeroMQ closed it here, and bytes did arrive: they hold no message, or none that ends.
        if not self._connection.established:
            return "died: its connection is closed"
        timeout_s = self._heartbeat_timeout_s
        if timeout_s is not None and self._connection.idle_s > timeout_s / 2:
            return UNRESPONSIVE.format(timeout_s)
        return DAMAGED

    def disconnected(self) -> None:
        """See `SenderControl.disconnected`."""
        self._ended.set()

    def delivered_bytes(self) -> int:
        """See `SenderControl.delivered_bytes`; 0 when the connection has ended."""
        with suppress(OSError):
            return self._connection.bytes_acked
        return 0

    async def aclose(self) -> None:
        """See `SenderControl.aclose`: end the connection, and close the socket when ZeroMQ has noticed the end.

        libzmq 4.3.5 aborts the process if the end of a connection reaches a socket that is being closed, while a
        message of several frames is half on its way.
        """
        self._connection.shutdown()
        with anyio.CancelScope(shield=True), anyio.move_on_after(UNNOTICED_S):
            while not self.socket.closed and int(self.socket.getsockopt(EVENTS)) & POLLOUT:
                await self._wait()
        self.socket.close(linger=0)
        self._connection.close()


async def connected(url: str, place: TcpAddress, identity: bytes, heartbeat_timeout_s: float | None) -> TcpControl:
    """Connect to the first address of `place` where a receiver with its key answers.

    Raises:
        NobodyListens: no connection can be made, its cause is the reason; or the listener does not answer.
        PeerClosed: the receiver ended the handshake: it has another key.
    """
    for address in place.addresses:
        socket = dealer(identity)
        socket.setsockopt(zmq.IPV6, int(":" in address))
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, 0)  # `heartbeat_timeout_s` bounds it
        if len(place.addresses) > 1:
            socket.setsockopt(zmq.CONNECT_TIMEOUT, int(1000 * ADDRESS_S))
        ping(socket, heartbeat_timeout_s)
        place.protect(socket, "sender")
        attempt = _Attempt(socket)
        try:
            control = await attempt.connect(url, f"tcp://{bracketed(address)}:{place.port}", heartbeat_timeout_s)
            if control is not None:
                return control
        except BaseException:
            attempt.close()
            raise
        attempt.close()
    reason = await _reason(place.addresses[-1], place.port)
    raise NobodyListens(f"expected a receiver at {url}, got {reason}: is its process running?") from reason


class _Attempt:
    """An attempt to connect, driven by the events of its socket."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._events: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        self._monitor = SocketMonitor(socket, _WATCHED, lambda *event: self._events.put_nowait(event))
        self._connection: TcpConnection | None = None

    async def connect(self, url: str, endpoint: str, heartbeat_timeout_s: float | None) -> TcpControl | None:
        """Return the connection when the handshake is done; None where `endpoint` cannot be reached."""
        self._socket.connect(endpoint)
        with handshake_timeout(heartbeat_timeout_s, url, NO_CONNECTION):
            event, fd = await self._events.get()
        if event != zmq.EVENT_CONNECTED:
            return None
        with suppress(OSError):  # it has ended already: the next event reports it
            self._connection = TcpConnection(fd)
            self._connection.limit_unsent()
        connected_s = anyio.current_time()
        with handshake_timeout(heartbeat_timeout_s, url, NO_HANDSHAKE):
            event, _ = await self._events.get()
        if event != zmq.EVENT_HANDSHAKE_SUCCEEDED or self._connection is None:
            waited_s = anyio.current_time() - connected_s
            likely = OTHER_KEY if waited_s < SETTLED_S else TOO_BUSY.format(waited_s)
            raise PeerClosed(f"the receiver at {url} ended the connection in the handshake{likely}")
        self._monitor.close()
        return TcpControl(self._socket, self._connection, heartbeat_timeout_s)

    def close(self) -> None:
        """Close the socket, its monitor and its connection."""
        self._monitor.close()
        self._socket.close(linger=0)
        if self._connection is not None:
            self._connection.close()


async def _reason(address: str, port: int) -> OSError:
    """Return the reason why connecting to `address` fails: ZeroMQ does not report it."""
    try:
        with anyio.move_on_after(ADDRESS_S):
            stream = await anyio.connect_tcp(address, port)
            await anyio.aclose_forcefully(stream)
    except OSError as error:
        return error.__cause__ if isinstance(error.__cause__, OSError) else error  # anyio's own has no number
    return OSError("no connection")
