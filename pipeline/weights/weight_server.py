"""Serves the versions of a publisher to mirrors on other hosts, over tcp with a key.

To the publisher each mirror is a subscriber like one of this host: it is notified of versions and pauses, and it is not
waited for once its connection has ended. Besides, a mirror requests chunks of the newest version, or of the one before
while that is not overwritten, or their deltas (`version_deltas`). Chunks are read from the publisher's memory as they
are requested, so `publish` waits for no mirror, and a slow one delays only itself. Mirrors join at the acceptor of a
port, as senders of a channel do.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets

import anyio
import anyio.to_thread
import zmq
from anyio.abc import TaskGroup

from ..._schemas import ProtocolMismatch
from ..._schemas.control import (
    CHUNK_BYTES,
    PROTOCOL_VERSION,
    Chunk,
    ChunkRequest,
    DeltaRequest,
    EndOfWeights,
    Message,
    MessageCount,
    NewVersion,
    NoDelta,
    PauseAck,
    Ready,
    Reject,
    SpanDelta,
    Subscribe,
    VersionGone,
    WeightLayout,
)
from ..channels.heartbeat import UNRESPONSIVE
from ..channels.keys import NONCE_BYTES, ChannelKey
from ..channels.message_counts import MessageCounts
from ..channels.rejections import DisconnectOnError, RejectionCounter, rejection_of
from ..channels.router_socket import RouterSocket
from ..channels.tcp_acceptor import Connection, TcpAcceptor
from ..channels.tcp_connection import TcpConnection
from ..channels.tcp_handshakes import LARGEST_HANDSHAKE_MESSAGE
from ..channels.turns import Share, Turn
from ..channels.unread import Inflow
from .version_deltas import DeltaEncoder
from .weight_subscriptions import Subscription, Subscriptions, refusal
from .weight_transfer import WINDOW, digest, extent
from .weights import WeightReader, WeightWriter

MOST_REQUESTS = 2 * WINDOW
"""Requests of a mirror that may wait: those of a version that was overwritten, and of the next."""

MOST_UNREAD_BYTES = MOST_REQUESTS * CHUNK_BYTES
"""Bytes of chunks and deltas that may wait for a mirror to receive them: one that keeps to its window never has so
many. Its own messages that wait here have fewer."""

SHORT_BYTES = 32
"""Bytes that any answer has at least, with its frame."""

MOST_DELTA_BYTES = WINDOW * CHUNK_BYTES
"""Bytes that wait for a mirror where no further delta is sent: it may be larger than the mirror expects, and chunks,
whose bytes the mirror bounds, take its place."""


class _Mirror:
    """A mirror that has subscribed: a `Session` of the acceptor, and the `Conversation` of a subscriber."""

    holds_place = False

    def __init__(
        self, server: WeightServer, connection: Connection, identity: bytes, request: Subscribe, proof: bytes
    ) -> None:
        self.name = f"{request.name} (pid {request.pid})"
        self.tcp: TcpConnection
        """Its connection, once it has answered."""
        self.requests: asyncio.Queue[ChunkRequest | DeltaRequest | None] = asyncio.Queue()
        """Chunks and deltas to send; None at the end of the connection."""
        self.open = True
        """Until its connection has ended, and `tcp` with it, or is about to be closed."""
        self.sent_bytes = 0
        """Bytes of the answers that were sent."""
        self.inflow = Inflow()
        self.most_unread = MOST_UNREAD_BYTES
        self.timeout_s: float | None = server.heartbeat_timeout_s
        self._counts = MessageCounts()
        """Of the messages after the handshake."""
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()
        self._server = server
        self._connection = connection
        self._identity = identity
        self._proof = proof
        """The proof of the key that its answer must hold."""

    async def send(self, message: Message) -> None:
        if not self._server.send(self._identity, message):
            raise anyio.BrokenResourceError
        self._counts.sent += 1
        if isinstance(message, NewVersion):
            self._server.deltas.begin(message.policy_version)

    @property
    def unread_bytes(self) -> int:
        """Return the bytes of answers that wait for it to receive them: they take memory here."""
        return self.sent_bytes - self.tcp.bytes_acked

    async def receive(self) -> Message:
        message = await self._messages.get()
        if message is None:
            raise anyio.EndOfStream
        return message

    def on_admitted(self, tcp: TcpConnection, answer: Ready) -> None:
        if not hmac.compare_digest(answer.proof, self._proof):
            raise ProtocolMismatch("expected a proof that the mirror has the key of these weights, got none or another")
        self.tcp = tcp
        self._server.serve(self)
        self._server.send(self._identity, Ready())

    def on_message(self, message: Message) -> None:
        """Pass a message on to the task that handles it.

        Raises:
            ProtocolMismatch: the mirror may not send it, or has sent too many.
        """
        if isinstance(message, MessageCount):
            self._compare(message)
            return
        self._counts.received += 1
        if isinstance(message, ChunkRequest | DeltaRequest) and self.requests.qsize() < MOST_REQUESTS:
            self.requests.put_nowait(message)
        elif isinstance(message, PauseAck) and self._messages.qsize() < MOST_REQUESTS:
            self._messages.put_nowait(message)
        else:
            kind = type(message).__name__
            raise ProtocolMismatch(f"expected at most {MOST_REQUESTS} requests at a time, got another {kind}")

    def _compare(self, reported: MessageCount) -> None:
        """Note that it asks for the count; close a connection that lost a message: the mirror makes another."""
        self._counts.answer_due = True
        if not self._counts.complete(reported):
            self._drop(f"a message of {self.name} was lost on its way")

    def on_check(self) -> None:
        if self._counts.answer_due:
            self._counts.answer_due = False
            self._server.send(self._identity, self._counts.report())

    def on_error(self, error: Exception) -> None:
        self.on_end()
        self._server.acceptor.refuse(self._connection, self._identity, self.name, rejection_of(error), error)

    def on_unresponsive(self) -> None:
        self._drop(f"{self.name} {UNRESPONSIVE.format(self.timeout_s)}")

    def _drop(self, reason: str) -> None:
        self.on_end()
        self._server.acceptor.drop(self._connection, reason)

    def on_end(self, *, damaged: bool = False) -> None:
        del damaged
        self.open = False
        self.requests.put_nowait(None)
        self._messages.put_nowait(None)


class WeightServer:
    """Serves each mirror in tasks of its own: the `Service` of its port."""

    first = Subscribe

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        url: str,
        port: int,
        *,
        key: ChannelKey,
        heartbeat_timeout_s: float,
        writer: WeightWriter,
        subscriptions: Subscriptions,
    ) -> None:
        """Serve the segment of `writer` on `socket`, which is bound to `port`."""
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self._key = key
        self._subscriptions = subscriptions
        self.tasks: TaskGroup
        """Serves the mirrors; set before the event loop runs on."""
        self._reader = WeightReader(writer.fd, writer.nbytes, writer.generation)
        self.deltas = DeltaEncoder(self._reader)
        self._generation = writer.generation
        self.acceptor = TcpAcceptor(
            self, socket, port, rejections=RejectionCounter(url), heartbeat_timeout_s=heartbeat_timeout_s
        )
        self._socket = RouterSocket(socket, self.acceptor.handle, lambda: None)
        self.send = self._socket.send

    def drain(self) -> bool:
        """Handle all messages that have arrived from mirrors within their window; return whether that was all."""
        most = 2 * MOST_REQUESTS * (1 + len(self.acceptor))
        return self._socket.drain(Turn(Share(most, most * LARGEST_HANDSHAKE_MESSAGE)))

    def begin(self, connection: Connection, identity: bytes, request: Subscribe) -> tuple[_Mirror, Message] | Reject:
        """Return the session of a mirror, and the layout of the weights."""
        if (rejection := refusal(request, same_user=True)) is not None:
            return rejection
        nonce, header = secrets.token_bytes(NONCE_BYTES), self._reader.layout.header
        layout = WeightLayout(
            PROTOCOL_VERSION,
            self._subscriptions.name,
            self._generation,
            self._subscriptions.pause,
            header,
            nonce,
            self._key.proof("receiver", nonce, request.nonce, header),
        )
        return _Mirror(self, connection, identity, request, self._key.proof("sender", nonce, request.nonce)), layout

    def serve(self, mirror: _Mirror) -> None:
        """Serve a mirror from now on."""
        subscription = Subscription(mirror.name, mirror)
        self._subscriptions.all.add(subscription)
        self.tasks.start_soon(self._serve, mirror, subscription)

    # -- chunks and deltas ---------------------------------------------------------------------------------------------

    async def _serve(self, mirror: _Mirror, subscription: Subscription) -> None:
        with DisconnectOnError(mirror.on_error):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._send_answers, mirror)
                await self._subscriptions.serve(subscription)
                tasks.cancel_scope.cancel()

    async def _send_answers(self, mirror: _Mirror) -> None:
        """Answer the requests of a mirror in their order, until its connection ends."""
        try:
            while (request := await mirror.requests.get()) is not None and mirror.open:
                self._check_unread(mirror)
                answer = await self._answer(request, mirror)
                await mirror.send(answer)
                mirror.sent_bytes += len(answer.content) if isinstance(answer, Chunk | SpanDelta) else SHORT_BYTES
        except anyio.BrokenResourceError:
            pass

    def _check_unread(self, mirror: _Mirror) -> None:
        """Check that a mirror receives what it requests."""
        if (unread := mirror.unread_bytes) > MOST_UNREAD_BYTES:
            raise ProtocolMismatch(
                f"expected requests from {mirror.name} when chunks arrive, got more while {unread} bytes have not"
            )

    async def _answer(self, request: ChunkRequest | DeltaRequest, mirror: _Mirror) -> Message:
        """Return the chunk or delta that was requested; or that its version was overwritten, also if meanwhile.

        Raises:
            ProtocolMismatch: there is no such chunk or span.
        """
        try:
            if isinstance(request, ChunkRequest):
                return await anyio.to_thread.run_sync(self._chunk, request)
            return await self._delta(request, mirror)
        except IndexError as error:
            raise ProtocolMismatch(str(error)) from None

    async def _delta(self, request: DeltaRequest, mirror: _Mirror) -> SpanDelta | NoDelta | VersionGone:
        version, index = request.policy_version, request.index
        if self._reader.sequence_of(version) is None:
            return VersionGone(version)
        delta = await self.deltas.delta(request)
        if delta is None or mirror.unread_bytes + len(delta.content) > MOST_DELTA_BYTES:
            return NoDelta(version, index)
        return delta

    def _chunk(self, request: ChunkRequest) -> Chunk | VersionGone:
        sequence, version = self._reader.sequence_of(request.policy_version), request.policy_version
        if sequence is None:
            return VersionGone(version)
        start, end = extent(request.index, self._reader.layout.nbytes)
        content = self._reader.tensors(sequence).span(start, end).tobytes()
        if not self._reader.intact(sequence):
            return VersionGone(version)
        return Chunk(version, request.index, digest(content, version, request.index), content)

    async def aclose(self) -> None:
        """Notify every mirror that no newer version follows, and close."""
        self.acceptor.broadcast(EndOfWeights())
        self._socket.unwatch()
        with anyio.CancelScope(shield=True):
            await self.acceptor.aclose()
