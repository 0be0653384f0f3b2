"""Serves the versions of a publisher to mirrors on other hosts, over tcp with a key.

To the publisher each mirror is a subscriber like one of this host: it is notified of versions and pauses, and it is not
waited for once its connection has ended. Besides, a mirror requests chunks of the newest version, or of the one before
while that is not overwritten. They are read from the publisher's memory as they are requested, so `publish` waits for
no mirror, and a slow one delays only itself.

A connection on which no mirror has subscribed holds no memory and is closed after `HANDSHAKE_S`; where too many wait,
the oldest one of the address with the most is closed, as at the port of a channel.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from urllib.parse import urlsplit

import anyio
import anyio.lowlevel
import anyio.to_thread
import zmq
from anyio.abc import TaskGroup

from ..._schemas import ProtocolMismatch
from ..._schemas.control import (
    CHUNK_BYTES,
    PROTOCOL_VERSION,
    Chunk,
    ChunkRequest,
    EndOfWeights,
    Message,
    MessageCount,
    PauseAck,
    Ready,
    Subscribe,
    VersionGone,
    WeightLayout,
    decode,
    encode,
)
from ..channels.heartbeat import CHECKS_PER_TIMEOUT, GRACE_S, UNRESPONSIVE
from ..channels.keys import ChannelKey
from ..channels.message_counts import MessageCounts
from ..channels.rejections import DisconnectOnError, RejectionCounter, reason_of, rejection_of
from ..channels.socket_monitor import ENDS_AND_BEGINNINGS, SocketMonitor
from ..channels.tcp_address import bind, bracketed, resolved
from ..channels.tcp_connection import TcpConnection
from ..channels.tcp_handshakes import (
    FAILED,
    LARGEST_HANDSHAKE_MESSAGE,
    MOST_OF_HANDSHAKE,
    SETTLED_S,
    excess,
    is_unserved,
    shut_down,
    shut_down_flood,
)
from ..channels.transport import HANDSHAKE_S, MAX_HANDSHAKES, router
from ..channels.unread import FRAMING_BYTES, BlockedLoopWatch, Inflow
from ..errors import InvalidConfig
from ..util.file_descriptors import available
from ..util.host import host_identity
from .event_socket import EventSocket
from .weight_address import WeightAddress
from .weight_memory import HostMemory
from .weight_subscriptions import Subscription, Subscriptions, refusal
from .weight_transfer import WINDOW, digest, span
from .weights import WeightReader, WeightWriter

DESCRIPTORS = 17
"""File descriptors that serving takes: the socket, temporary ones, and those of ZeroMQ itself, once."""

MOST_REQUESTS = 2 * WINDOW
"""Requests of a mirror that may wait: those of a version that was overwritten, and of the next."""

MOST_UNREAD_BYTES = MOST_REQUESTS * CHUNK_BYTES
"""Bytes of chunks that may wait for a mirror to receive them: one that keeps to its window never has so many. Its own
messages that wait here have fewer."""

FLUSH_S = 5.0
"""Bound on the time in which ZeroMQ sends the last messages."""

CHECK_INTERVAL_S = 1.0
"""The longest interval between checks for mirrors that are unresponsive, or have sent too much."""


class _Mirror:
    """A mirror that has subscribed: a `Conversation`."""

    def __init__(self, request: Subscribe, identity: bytes, send: Callable[[bytes, Message], None]) -> None:
        self.name = f"{request.name} (pid {request.pid})"
        self.identity = identity
        """The identity of its socket."""
        self.tcp: TcpConnection | None = None
        """Its connection, once it has answered: that was open after the events of its descriptor were read."""
        self.requests: asyncio.Queue[ChunkRequest | None] = asyncio.Queue()
        """Chunks to send; None at the end of the connection."""
        self.ended = False
        """Whether its connection has ended, and `tcp` with it."""
        self.sent_bytes = 0
        """Bytes of the chunks that were sent."""
        self.inflow = Inflow()
        """Bytes of its messages that were handled."""
        self.counts = MessageCounts()
        """Of the messages after the handshake."""
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()
        self._send = send

    async def send(self, message: Message) -> None:
        self._send(self.identity, message)
        self.counts.sent += 1

    async def receive(self) -> Message:
        message = await self._messages.get()
        if message is None:
            raise anyio.EndOfStream
        return message

    def on_message(self, message: Message) -> None:
        """Pass a message on to the task that handles it.

        Raises:
            ProtocolMismatch: the mirror may not send it, or has sent too many.
        """
        self.counts.received += 1
        if isinstance(message, ChunkRequest) and self.requests.qsize() < MOST_REQUESTS:
            self.requests.put_nowait(message)
        elif isinstance(message, PauseAck) and self._messages.qsize() < MOST_REQUESTS:
            self._messages.put_nowait(message)
        else:
            kind = type(message).__name__
            raise ProtocolMismatch(f"expected at most {MOST_REQUESTS} requests at a time, got another {kind}")

    def exceeds_twice(self, received: int) -> bool:
        return self.inflow.unread(received) > 2 * MOST_UNREAD_BYTES

    def on_end(self) -> None:
        self.ended = True
        self.requests.put_nowait(None)
        self._messages.put_nowait(None)


class _Connection:
    """A connection to the port."""

    def __init__(self, fd: int, port: int | None) -> None:
        self.fd = fd
        self.since_s = time.monotonic()
        self._port = port
        """The port to which it is."""
        self.host = ""
        """The other side's address, where the kernel still knew it."""
        self.mirror: _Mirror | None = None
        """The mirror that has subscribed on it."""
        self.closing = False
        """Whether it is about to be closed: its messages are ignored."""
        self.timer: asyncio.TimerHandle | None = None
        """Closes it, unless its mirror answers before."""
        with suppress(OSError), TcpConnection(fd) as tcp:
            self.host = tcp.host

    @property
    def unserved(self) -> bool:
        return is_unserved(self.fd, self.host, self._port)

    @property
    def pending(self) -> bool:
        """Return whether no mirror has answered on it."""
        return not self.closing and (self.mirror is None or self.mirror.tcp is None)


class WeightServer:
    """Accepts mirrors, and serves each in tasks of its own."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        url: str,
        heartbeat_timeout_s: float,
        writer: WeightWriter,
        subscriptions: Subscriptions,
    ) -> None:
        """Prepare to serve the segment of `writer` on `socket`, which is bound to the port of `url`."""
        self._socket = socket
        self._port = urlsplit(url).port
        self._events = EventSocket(socket)
        self._subscriptions = subscriptions
        self._tasks: TaskGroup
        """Serves the mirrors, while `run` runs."""
        self._running = False
        self._rejections = RejectionCounter(url)
        self._reader = WeightReader(writer.fd, writer.nbytes, writer.generation)
        self._generation = writer.generation
        self._connections: dict[int, _Connection] = {}
        """By descriptor, the oldest first."""
        self._limit_scheduled = False
        """Whether a count of the pending connections is scheduled."""
        self._loop = asyncio.get_running_loop()
        self._monitor = SocketMonitor(socket, ENDS_AND_BEGINNINGS, self._on_event)
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._check_interval_s = min(CHECK_INTERVAL_S, heartbeat_timeout_s / CHECKS_PER_TIMEOUT)
        self._check = self._loop.call_later(self._check_interval_s, self._check_connections)
        self.watch = BlockedLoopWatch(2 * CHECK_INTERVAL_S, self._shut_down_floods)

    async def run(self) -> None:
        """Serve until cancelled."""
        async with anyio.create_task_group() as self._tasks:
            self._running = True
            try:
                while True:
                    self._handle(*await self._events.receive())
                    self._drain()
                    await anyio.lowlevel.checkpoint()  # where messages pour in, others run, and what ends that
            finally:
                self._running = False

    # -- messages ------------------------------------------------------------------------------------------------------

    def _handle(self, identity: zmq.Frame, *frames: zmq.Frame) -> None:
        """Handle a message of the socket with `identity`."""
        self._monitor.read()
        connection = self._connections.get(int(identity.get(zmq.SRCFD)))
        if connection is None or connection.closing:
            return
        if connection.mirror is not None:
            connection.mirror.inflow.handled += sum(map(len, frames)) + FRAMING_BYTES * len(frames)
        with DisconnectOnError(self._refuse, connection, identity.bytes):
            self._step(connection, identity.bytes, _message(frames))

    def _step(self, connection: _Connection, identity: bytes, message: Message) -> None:
        # There are four cases:
        #
        # 1. The mirror of this connection has answered before: the message is for its tasks.
        # 2. It answers now: it is served from now on.
        # 3. No mirror has answered: one subscribes. If another one had, its connection had the same descriptor.
        # 4. The message is one of a connection that had the same descriptor.
        mirror = connection.mirror
        if mirror is not None and mirror.identity == identity:
            if mirror.tcp is not None and isinstance(message, MessageCount):
                self._compare(connection, mirror, message)
            elif mirror.tcp is not None:
                mirror.on_message(message)
            elif isinstance(message, Ready):
                self._admit(connection, mirror)
            else:
                raise ProtocolMismatch(f"expected Ready, got {type(message).__name__}")
        elif connection.pending:
            self._welcome(connection, identity, message)

    def _welcome(self, connection: _Connection, identity: bytes, request: Message) -> None:
        if not isinstance(request, Subscribe):
            raise ProtocolMismatch(f"expected Subscribe, got {type(request).__name__}")
        rejection = refusal(request, same_user=True)
        if rejection is not None:
            raise ProtocolMismatch(rejection.reason)
        connection.mirror = _Mirror(request, identity, self._send)
        self._set_deadline(connection)
        header, pause = self._reader.layout.header, self._subscriptions.pause
        self._send_last(
            identity, WeightLayout(PROTOCOL_VERSION, self._subscriptions.name, self._generation, pause, header)
        )

    def _admit(self, connection: _Connection, mirror: _Mirror) -> None:
        mirror.tcp = TcpConnection(connection.fd)
        mirror.inflow.begin(mirror.tcp.bytes_received)
        if connection.timer is not None:
            connection.timer.cancel()
        subscription = Subscription(mirror.name, mirror)
        self._subscriptions.all.add(subscription)
        self._tasks.start_soon(self._serve, connection, mirror, subscription)
        self._send_last(mirror.identity, Ready())

    def _compare(self, connection: _Connection, mirror: _Mirror, reported: MessageCount) -> None:
        """Note that a mirror asks for the count; close a connection on which a message was lost: it makes another."""
        mirror.counts.answer_due = True
        if not mirror.counts.complete(reported):
            self._drop(connection, f"a message of {mirror.name} was lost on its way")

    def _send(self, identity: bytes, message: Message) -> None:
        self._events.send(identity, encode(message))

    def _send_last(self, identity: bytes, message: Message) -> None:
        """Send a message; where the connection has ended, that is reported by itself."""
        with suppress(anyio.BrokenResourceError):
            self._send(identity, message)

    def _refuse(self, connection: _Connection, identity: bytes, error: Exception) -> None:
        """Notify a peer that it is refused, and disconnect it if it has subscribed.

        Another one may have had a connection with the same descriptor: then this connection is not to blame. If it is,
        it is closed after `HANDSHAKE_S`.
        """
        self._rejections.record(f"a connection from {connection.host}: {reason_of(error)}", error)
        self._send_last(identity, rejection_of(error))
        if connection.mirror is not None and connection.mirror.identity == identity:
            self._close_after(GRACE_S, connection)  # when the message has had the time to leave

    # -- chunks --------------------------------------------------------------------------------------------------------

    async def _serve(self, connection: _Connection, mirror: _Mirror, subscription: Subscription) -> None:
        with DisconnectOnError(self._refuse, connection, mirror.identity):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._send_chunks, mirror)
                await self._subscriptions.serve(subscription)
                tasks.cancel_scope.cancel()

    async def _send_chunks(self, mirror: _Mirror) -> None:
        """Answer the requests of a mirror in their order, until its connection ends."""
        try:
            while (request := await mirror.requests.get()) is not None and not mirror.ended:
                self._check_unread(mirror)
                answer = await anyio.to_thread.run_sync(self._answer, request)
                await mirror.send(answer)
                mirror.sent_bytes += len(answer.content) if isinstance(answer, Chunk) else 0
        except anyio.BrokenResourceError:
            pass

    def _check_unread(self, mirror: _Mirror) -> None:
        """Check that a mirror receives the chunks that it requests: those that wait take memory here."""
        assert mirror.tcp is not None  # noqa: S101 (it is served)
        unread = mirror.sent_bytes - mirror.tcp.bytes_acked
        if unread > MOST_UNREAD_BYTES:
            raise ProtocolMismatch(
                f"expected requests from {mirror.name} when chunks arrive, got more while {unread} bytes have not"
            )

    def _answer(self, request: ChunkRequest) -> Message:
        """Return the chunk that was requested; or that its version was overwritten, also if it was so meanwhile.

        Raises:
            ProtocolMismatch: there is no such chunk.
        """
        sequence, version = self._reader.sequence_of(request.policy_version), request.policy_version
        if sequence is None:
            return VersionGone(version)
        try:
            start, end = span(request.index, self._reader.layout.nbytes)
        except IndexError as error:
            raise ProtocolMismatch(str(error)) from None
        first, memory = self._reader.tensors(sequence).start, self._reader.memory
        assert isinstance(memory, HostMemory)  # noqa: S101 (see `serving`)
        content = memory.bytes[first + start : first + end].tobytes()
        if not self._reader.intact(sequence):
            return VersionGone(version)
        return Chunk(version, request.index, digest(content), content)

    # -- connections ---------------------------------------------------------------------------------------------------

    def _on_event(self, event: int, fd: int) -> None:
        """Note the beginning or the end of a connection."""
        if event == zmq.EVENT_ACCEPTED:
            self._on_accepted(fd)
        else:
            self._forget(fd)

    def _on_accepted(self, fd: int) -> None:
        connection = self._connections[fd] = _Connection(fd, self._port)
        self._set_deadline(connection)
        if not self._limit_scheduled and len(self._connections) > MAX_HANDSHAKES:
            self._limit_scheduled = True
            self._loop.call_soon(self._limit_pending)

    def _set_deadline(self, connection: _Connection) -> None:
        """Close a connection on which no mirror has answered within `HANDSHAKE_S` from now."""
        if connection.timer is not None:
            connection.timer.cancel()
        due_s = self._loop.time() + HANDSHAKE_S
        connection.timer = self._loop.call_later(HANDSHAKE_S, self._expired, connection, due_s)

    def _expired(self, connection: _Connection, due_s: float) -> None:
        late = self._loop.time() - due_s > SETTLED_S
        self._drain()
        if connection.pending and (late or connection.unserved):
            self._set_deadline(connection)  # the time in which this port did not get to it is not its peer's
        elif connection.pending:
            self._drop(connection, f"a connection from {connection.host} did not subscribe for {HANDSHAKE_S} s")

    def _limit_pending(self) -> None:
        """Close the oldest connections of the address with the most, where too many have not subscribed."""
        self._limit_scheduled = False
        self._drain()  # a connection whose mirror has answered does not count
        pending = [connection for connection in self._connections.values() if connection.pending]
        for connection in excess(pending, MAX_HANDSHAKES):
            self._drop(connection, f"too many connections from {connection.host} do not subscribe")

    def _drain(self) -> bool:
        """Handle all messages that have arrived from mirrors within their window; return whether none is left."""
        emptied = False
        for _ in range(2 * MOST_REQUESTS * (1 + len(self._connections))):
            if not self._running or (message := self._events.receive_nowait()) is None:
                emptied = True
                break
            self._handle(*message)
        self._monitor.read()
        return emptied

    def _drop(self, connection: _Connection, reason: str) -> None:
        self._rejections.record(reason)
        self._close_after(0, connection)

    def _close_after(self, delay_s: float, connection: _Connection) -> None:
        """Ignore a connection from now on, and close it after `delay_s`."""
        connection.closing = True
        if connection.timer is not None:
            connection.timer.cancel()
        if connection.mirror is not None:
            connection.mirror.on_end()
        connection.timer = self._loop.call_later(delay_s, self._shut_down, connection)

    def _shut_down(self, connection: _Connection) -> None:
        if self._connections.get(connection.fd) is connection:
            shut_down(connection.fd, connection.host, self._port)

    def _forget(self, fd: int) -> None:
        """Release what is held for a connection that has ended."""
        connection = self._connections.pop(fd, None)
        if connection is None:
            return
        if connection.timer is not None:
            connection.timer.cancel()
        if connection.mirror is None and not connection.closing:
            self._rejections.record(FAILED)
        if connection.mirror is not None:
            connection.mirror.on_end()
            if connection.mirror.tcp is not None:
                connection.mirror.tcp.close()

    def _check_connections(self) -> None:
        self._check = self._loop.call_later(self._check_interval_s, self._check_connections)
        emptied = self._drain()
        self.watch.beat()
        if len(self._connections) > MAX_HANDSHAKES:
            self._limit_pending()
        for connection in list(self._connections.values()):
            mirror = connection.mirror
            if mirror is None or mirror.tcp is None:
                self._check_pending(connection)
            elif not connection.closing:
                self._check_mirror(connection, mirror, mirror.tcp, emptied=emptied)

    def _check_pending(self, connection: _Connection) -> None:
        if shut_down_flood(connection.fd, connection.host, self._port, _exceeds_handshake):
            self._drop(connection, f"a connection from {connection.host} sent too much before it subscribed")

    def _check_mirror(self, connection: _Connection, mirror: _Mirror, tcp: TcpConnection, *, emptied: bool) -> None:
        received = tcp.bytes_received
        if emptied:
            mirror.inflow.settle(received)
        if mirror.inflow.unread(received) > MOST_UNREAD_BYTES:
            reason = "too many bytes of messages that wait, or of one that does not end"
            self._refuse(connection, mirror.identity, ProtocolMismatch(reason))
        elif tcp.unresponsive(self._heartbeat_timeout_s):
            self._drop(connection, f"{mirror.name} {UNRESPONSIVE.format(self._heartbeat_timeout_s)}")
        elif mirror.counts.answer_due:
            mirror.counts.answer_due = False
            self._send_last(mirror.identity, mirror.counts.report())

    def _shut_down_floods(self) -> None:
        """End connections that have sent more than twice what they may, while the loop is blocked: in a thread."""
        for event, fd in self._monitor.undelivered():
            if event == zmq.EVENT_ACCEPTED:
                shut_down_flood(fd, None, self._port, _exceeds_handshake)
        for connection in list(self._connections.values()):
            mirror = connection.mirror
            exceeds = _exceeds_handshake if mirror is None or mirror.tcp is None else mirror.exceeds_twice
            shut_down_flood(connection.fd, connection.host, self._port, exceeds)

    async def aclose(self) -> None:
        """Notify every mirror that no newer version follows, and close."""
        mirrors = [connection.mirror for connection in self._connections.values() if connection.mirror is not None]
        for mirror in mirrors:
            self._send_last(mirror.identity, EndOfWeights())
        self._check.cancel()
        self.watch.close()
        self._monitor.close()
        self._events.close()
        self._socket.close()
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for mirror in mirrors:
                    if mirror.tcp is not None:
                        tasks.start_soon(mirror.tcp.finish, FLUSH_S)
        for fd, connection in list(self._connections.items()):
            connection.closing = True
            self._forget(fd)


def _exceeds_handshake(received: int) -> bool:
    return received > MOST_OF_HANDSHAKE


def _message(frames: Sequence[zmq.Frame]) -> Message:
    if len(frames) != 1:
        raise ProtocolMismatch(f"expected a message in one frame, got {len(frames)}")
    return decode(frames[0].buffer)


@asynccontextmanager
async def serving(
    url: str, key: ChannelKey | None, heartbeat_timeout_s: float, writer: WeightWriter, subscriptions: Subscriptions
) -> AsyncIterator[WeightAddress]:
    """Serve the versions of `writer` to other hosts within the body; see `WeightPublisher.serve`."""
    if writer.handle is not None:
        raise InvalidConfig(
            f"device: expected versions in memory of the host, which other hosts can receive, got some on "
            f"{writer.handle.device}: publish with device='cpu'"
        )
    available(DESCRIPTORS, "weights over tcp")
    place = await anyio.to_thread.run_sync(resolved, url, key)
    host = await anyio.to_thread.run_sync(host_identity)
    socket = router()
    try:
        socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_HANDSHAKE_MESSAGE)  # longer ones are of no mirror
        place.key.protect(socket, "receiver")
        served = f"tcp://{bracketed(place.host)}:{bind(socket, place)}"
        server = WeightServer(socket, served, heartbeat_timeout_s, writer, subscriptions)
    except BaseException:
        socket.close(linger=0)
        raise
    stack = AsyncExitStack()
    stack.push_async_callback(server.aclose)
    try:
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        tasks.start_soon(server.run)
        await anyio.to_thread.run_sync(server.watch.start)
        yield WeightAddress(served, place.key, subscriptions.url, host, writer.generation, heartbeat_timeout_s)
    finally:
        await stack.aclose()  # not `async with`: the task group would wrap exceptions of the body
