"""Serves the versions of a publisher to mirrors on other hosts, over tcp with a key.

To the publisher each mirror is a subscriber like one of this host: it is notified of versions and pauses, and it is not
waited for once its connection has ended. Besides, a mirror requests chunks of the newest version, or of the one before
while that is not overwritten. They are read from the publisher's memory as they are requested, so `publish` waits for
no mirror, and a slow one delays only itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import anyio
import anyio.to_thread
import zmq
from anyio.abc import TaskGroup

from ..._schemas import ProtocolMismatch
from ..._schemas.control import (
    PROTOCOL_VERSION,
    Chunk,
    ChunkRequest,
    EndOfWeights,
    Layout,
    Message,
    PauseAck,
    Ready,
    Reject,
    Subscribe,
    VersionGone,
    decode,
    encode,
)
from ..channels.heartbeat import DEFAULT_HEARTBEAT_TIMEOUT_S, enable_heartbeats
from ..channels.keys import ChannelKey
from ..channels.socket_monitor import SocketMonitor
from ..channels.tcp_address import bind, bracketed, resolved
from ..channels.tcp_connection import TcpConnection
from ..channels.transport import router
from ..util.extras import extra
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

FLUSH_S = 5.0
"""Bound on the time in which ZeroMQ sends the last messages."""

_WATCHED = int(
    zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class _Mirror:
    """The connection of a mirror: a `Conversation`."""

    def __init__(self, request: Subscribe, fd: int, send: Callable[[Message], None]) -> None:
        self.name = f"{request.name} (pid {request.pid})"
        self.fd = fd
        """The descriptor of its connection."""
        self.ready = False
        """Whether it has answered: its connection was open after the events of its descriptor were read."""
        self.requests: asyncio.Queue[ChunkRequest | None] = asyncio.Queue()
        """Chunks to send; None at the end of the connection."""
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()
        self._send = send

    async def send(self, message: Message) -> None:
        self._send(message)

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
        if isinstance(message, ChunkRequest) and self.requests.qsize() < MOST_REQUESTS:
            self.requests.put_nowait(message)
        elif isinstance(message, PauseAck) and self._messages.qsize() < MOST_REQUESTS:
            self._messages.put_nowait(message)
        else:
            raise ProtocolMismatch(f"expected at most {MOST_REQUESTS} requests at a time, got another {message}")

    def on_end(self) -> None:
        self.requests.put_nowait(None)
        self._messages.put_nowait(None)


class WeightServer:
    """Accepts mirrors, and serves each in tasks of its own."""

    def __init__(self, socket: zmq.Socket[bytes], writer: WeightWriter, subscriptions: Subscriptions) -> None:
        """Prepare to serve the segment of `writer` on `socket`, which is bound."""
        self._socket = socket
        self._events = EventSocket(socket)
        self._subscriptions = subscriptions
        self._reader = WeightReader(writer.fd, writer.nbytes, writer.generation)
        self._generation = writer.generation
        self._mirrors: dict[bytes, _Mirror] = {}
        """Mirrors by the identity of their sockets."""
        self._connections: dict[int, TcpConnection | None] = {}
        """Open connections by descriptor."""
        self._monitor = SocketMonitor(socket, _WATCHED, self._on_event)

    async def run(self) -> None:
        """Serve until cancelled."""
        async with anyio.create_task_group() as tasks:
            while True:
                identity, *frames = await self._events.receive()
                fd = int(identity.get(zmq.SRCFD))
                try:
                    self._handle(identity.bytes, fd, decode(frames[-1].buffer), tasks)
                except ProtocolMismatch as error:
                    self._refuse(identity.bytes, Reject("ProtocolMismatch", str(error)))

    def _handle(self, identity: bytes, fd: int, message: Message, tasks: TaskGroup) -> None:
        """Handle a message of the mirror `identity`, which came on connection `fd`."""
        self._monitor.read()
        mirror = self._mirrors.get(identity)
        if mirror is None:
            self._admit(identity, fd, message)
        elif mirror.ready:
            mirror.on_message(message)
        elif isinstance(message, Ready):
            mirror.ready = True
            subscription = Subscription(mirror.name, mirror)
            self._subscriptions.all.add(subscription)
            tasks.start_soon(self._serve, mirror, subscription)
            with suppress(anyio.BrokenResourceError):  # its end is reported
                self._events.send(identity, encode(Ready()))
        else:
            raise ProtocolMismatch(f"expected Ready, got {type(message).__name__}")

    def _admit(self, identity: bytes, fd: int, request: Message) -> None:
        if not isinstance(request, Subscribe):
            raise ProtocolMismatch(f"expected Subscribe, got {type(request).__name__}")
        rejection = refusal(request, same_user=True)
        if rejection is not None:
            self._refuse(identity, rejection)
        elif fd in self._connections:
            self._mirrors[identity] = _Mirror(request, fd, lambda message: self._events.send(identity, encode(message)))
            header, pause = self._reader.layout.header, self._subscriptions.pause
            layout = Layout(PROTOCOL_VERSION, self._subscriptions.name, self._generation, pause, header)
            with suppress(anyio.BrokenResourceError):  # its end is reported
                self._events.send(identity, encode(layout))

    def _refuse(self, identity: bytes, rejection: Reject) -> None:
        self._subscriptions.refused(rejection.reason)
        with suppress(anyio.BrokenResourceError):
            self._events.send(identity, encode(rejection))
        if identity in self._mirrors:
            self._mirrors.pop(identity).on_end()

    async def _serve(self, mirror: _Mirror, subscription: Subscription) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._send_chunks, mirror)
            await self._subscriptions.serve(subscription)
            tasks.cancel_scope.cancel()

    async def _send_chunks(self, mirror: _Mirror) -> None:
        """Answer the requests of a mirror in their order, until its connection ends."""
        with suppress(anyio.BrokenResourceError):
            while (request := await mirror.requests.get()) is not None:
                await mirror.send(await anyio.to_thread.run_sync(self._answer, request))

    def _answer(self, request: ChunkRequest) -> Message:
        """Return the chunk that was requested; or that its version was overwritten, also if it was so meanwhile."""
        sequence, version = self._reader.sequence_of(request.policy_version), request.policy_version
        if sequence is None:
            return VersionGone(version)
        try:
            start, end = span(request.index, self._reader.layout.nbytes)
        except IndexError as error:
            return Reject("ProtocolMismatch", str(error))
        first, memory = self._reader.tensors(sequence).start, self._reader.memory
        assert isinstance(memory, HostMemory)  # noqa: S101 (see `serving`)
        content = memory.bytes[first + start : first + end].tobytes()
        if not self._reader.intact(sequence):
            return VersionGone(version)
        return Chunk(version, request.index, digest(content), content)

    def _on_event(self, event: int, fd: int) -> None:
        """Note the beginning or the end of a connection."""
        if event == zmq.EVENT_ACCEPTED:
            self._connections[fd] = None
            with suppress(OSError):  # it has ended already
                self._connections[fd] = TcpConnection(fd)
        elif event == zmq.EVENT_DISCONNECTED:
            self._forget(fd)
            for identity in [identity for identity, mirror in self._mirrors.items() if mirror.fd == fd]:
                self._mirrors.pop(identity).on_end()
        else:
            self._subscriptions.refused("a handshake failed: the peer has another key or none, or is another program")

    def _forget(self, fd: int) -> None:
        connection = self._connections.pop(fd, None)
        if connection is not None:
            connection.close()

    async def aclose(self) -> None:
        """Notify every mirror that no newer version follows, and close."""
        for identity in self._mirrors:
            with suppress(anyio.BrokenResourceError):
                self._events.send(identity, encode(EndOfWeights()))
        self._monitor.close()
        self._events.close()
        self._socket.close()
        held = [connection for connection in self._connections.values() if connection is not None]
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for connection in held:
                    tasks.start_soon(connection.finish, FLUSH_S)
        for fd in list(self._connections):
            self._forget(fd)


@asynccontextmanager
async def serving(
    url: str, key: ChannelKey | None, writer: WeightWriter, subscriptions: Subscriptions
) -> AsyncIterator[WeightAddress]:
    """Serve the versions of `writer` to other hosts within the body; see `WeightPublisher.serve`."""
    if writer.handle is not None:
        raise ValueError(
            f"expected versions in memory of the host, which other hosts can receive, got some on "
            f"{writer.handle.device}: publish with device='cpu'"
        )
    with extra("torch", "weights over tcp"):
        import xxhash  # noqa: F401, PLC0415 (chunks are hashed with it)
    available(DESCRIPTORS, "weights over tcp")
    place = await anyio.to_thread.run_sync(resolved, url, key)
    host = await anyio.to_thread.run_sync(host_identity)
    socket = router()
    try:
        enable_heartbeats(socket, DEFAULT_HEARTBEAT_TIMEOUT_S)
        place.key.protect(socket, "receiver")
        port = bind(socket, place)
        server = WeightServer(socket, writer, subscriptions)
    except BaseException:
        socket.close(linger=0)
        raise
    stack = AsyncExitStack()
    stack.push_async_callback(server.aclose)
    try:
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        tasks.start_soon(server.run)
        yield WeightAddress(
            f"tcp://{bracketed(place.host)}:{port}", place.key, subscriptions.url, host, writer.generation
        )
    finally:
        await stack.aclose()  # not `async with`: the task group would wrap exceptions of the body
