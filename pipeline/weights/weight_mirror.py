"""The mirror of a publisher on another host: one process of each host receives every version, once, and shares it.

It requests the chunks of a version over tcp, checks their hashes, writes them into a segment of shared memory like the
publisher's, and serves subscribers of its host like the publisher does those of its own. So models are views here too,
and a pause reaches every sampler: the mirror confirms it when all of its subscribers have.

A connection that ends is made again, as often as it takes for `RECONNECT_TIMEOUT_S`, and the transfer continues where
it stopped, or with the newest version. If that fails, the subscribers are notified that the publisher is lost.
"""

from __future__ import annotations

import math
import secrets
import socket as sockets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from os import getpid
from pathlib import Path
from typing import Self

import anyio
import anyio.to_thread
import numpy as np
from anyio.abc import SocketListener, TaskGroup, TaskStatus

from ..._schemas import ProtocolMismatch
from ..._schemas.control import (
    PROTOCOL_VERSION,
    Chunk,
    ChunkRequest,
    EndOfWeights,
    Message,
    MessageCount,
    NewVersion,
    Pause,
    PauseAck,
    Ready,
    Reject,
    Resume,
    Subscribe,
    VersionGone,
    WeightLayout,
    printable,
)
from ..accounting.telemetry import get_logger
from ..channels.control_connection import serve_control
from ..channels.handshake import NOT_SERVED, handshake_timeout
from ..channels.message_counts import MessageCounts, count_interval_s
from ..channels.socket_directory import shared_directory
from ..channels.tcp_address import resolved
from ..channels.tcp_control import TcpControl, connected
from ..errors import PeerClosed, PeerLost, PenstockError, StaleHandle
from ..util.blocking import enter_in_thread
from ..util.exception_groups import unwrap_single
from ..util.file_descriptors import available
from ..util.retry_pace import LAST_RETRY_S, RetryPace
from ..util.waiting import Waiters
from .folder_mirror import FolderReader, folder_mirror
from .tensor_layout import LENGTH, TensorLayout, WritePlan
from .weight_address import WeightAddress
from .weight_connection import SCHEME, listening_in
from .weight_reconnection import RECONNECT_TIMEOUT_S, reconnected
from .weight_subscriptions import RELEASE_TIMEOUT_S, Subscriptions
from .weight_transfer import MOST_DAMAGED, VersionTransfer, span
from .weights import NO_VERSION, WeightWriter

log = get_logger("penstock.weights")

DESCRIPTORS = 24
"""File descriptors that a mirror takes: two sockets, a segment, temporary ones, and those of ZeroMQ itself, once."""


LINK_DESCRIPTORS = 8
"""Those of a connection: after a cut they may have been taken meanwhile."""


class _Link:
    """A connection to the publisher."""

    def __init__(self, control: TcpControl, layout: WeightLayout, address: WeightAddress) -> None:
        self.address = address
        self.layout = layout
        self._counts = MessageCounts()
        """Of the messages after the handshake."""
        self._count_interval_s = count_interval_s(address.heartbeat_timeout_s)
        self._used = False
        """True once a message came on it after the handshake."""
        self._opened_s = anyio.current_time()
        self._control = control

    @classmethod
    async def open(cls, address: WeightAddress) -> Self:
        """Connect, and complete the handshake.

        Raises:
            NobodyListens: no publisher answers at the address.
            PeerClosed: the publisher has another key.
            StaleHandle: another publisher answers.
            ProtocolMismatch: the publisher has another protocol version.
            OutOfFileDescriptors: this process has too few left.
        """
        available(LINK_DESCRIPTORS, "weights of another host")
        timeout_s = address.heartbeat_timeout_s
        with handshake_timeout(timeout_s, address.url):
            place = await anyio.to_thread.run_sync(resolved, address.url, address.key)
        identity = b"m" + secrets.token_bytes(15)
        control = await connected(address.url, place, identity, timeout_s)
        try:
            with handshake_timeout(timeout_s, address.url, NOT_SERVED):
                name = f"mirror on {sockets.gethostname()}"[:100]
                await control.send(Subscribe(PROTOCOL_VERSION, name, getpid()))
                layout = _layout(await control.receive(), address)
                await control.send(Ready())
                _confirmed(await control.receive(), address)
        except BaseException as error:
            await control.aclose()
            if isinstance(error, anyio.EndOfStream | anyio.BrokenResourceError):
                raise PeerLost(f"the publisher at {address.url} closed the connection in the handshake") from None
            raise
        return cls(control, layout, address)

    @property
    def worked(self) -> bool:
        """Return whether it is a cut that ended it, and not its publisher at once."""
        return self._used or anyio.current_time() > self._opened_s + LAST_RETRY_S

    async def send(self, message: Message) -> None:
        """Send `message`.

        Raises:
            anyio.BrokenResourceError: the connection has ended.
        """
        await self._control.send(message)
        self._counts.sent += 1

    async def receive(self) -> Message:
        """Return the next message.

        Raises:
            anyio.EndOfStream: the connection has ended, or a message of the publisher was lost on it.
            ProtocolMismatch: it is no message.
        """
        while True:
            message = await self._control.receive()
            self._used = True
            if not isinstance(message, MessageCount):
                self._counts.received += 1
                return message
            if not self._counts.complete(message):
                log.warning("weights_message_lost", expected=message.sent, received=self._counts.received)
                raise anyio.EndOfStream

    async def report_counts(self) -> None:
        """Send the number of messages that were sent, until the connection ends; the publisher answers with its own."""
        with suppress(anyio.BrokenResourceError):  # `receive` ends too
            while True:
                await anyio.sleep(self._count_interval_s)
                await self._control.send(self._counts.report())

    async def aclose(self) -> None:
        """Close the connection. Closing twice is fine."""
        await self._control.aclose()


def _layout(answer: Message, address: WeightAddress) -> WeightLayout:
    _accepted(answer, address)
    if not isinstance(answer, WeightLayout):
        raise ProtocolMismatch(f"expected a WeightLayout, got {type(answer).__name__}")
    if answer.generation != address.generation:
        raise StaleHandle(
            f"expected weights of publisher {address.generation:x} at {address.url}, got those of "
            f"{answer.generation:x}: use the address that the present one serves"
        )
    return answer


def _accepted(answer: Message, address: WeightAddress) -> None:
    if isinstance(answer, Reject):
        raise ProtocolMismatch(f"the publisher at {address.url} refused: {printable(answer.reason)}")


def _confirmed(answer: Message, address: WeightAddress) -> None:
    _accepted(answer, address)
    if not isinstance(answer, Ready):
        raise ProtocolMismatch(f"expected Ready, got {type(answer).__name__}")


class WeightMirror:
    """Receives the versions of a publisher into a segment of this host, and serves subscribers."""

    def __init__(self, link: _Link, writer: WeightWriter, nbytes: int, url: str, tasks: TaskGroup) -> None:
        self.subscriptions = Subscriptions(link.layout.name, RELEASE_TIMEOUT_S)
        self.subscriptions.open(writer, url)
        self._link = link
        self._writer = writer
        self._nbytes = nbytes
        """Bytes of a version."""
        self._tasks = tasks
        self._announced = NO_VERSION
        """The newest version that the publisher has announced."""
        self._gone = NO_VERSION
        """The last version that was overwritten before it had arrived."""
        self._transfer: VersionTransfer | None = None
        """The transfer into the buffer that is not the newest."""
        self._pausing: anyio.CancelScope | None = None
        """The scope of the task that pauses the subscribers."""
        self._final = False
        self._changed = Waiters()
        """Wakes the task that requests chunks."""

    async def follow(self) -> None:
        """Receive versions until the publisher closes, then notify the subscribers of the end."""
        address = self._link.address
        last: EndOfWeights | Reject = EndOfWeights()
        pace = RetryPace(RECONNECT_TIMEOUT_S)
        try:
            while not await self._received(self._link):
                await self._link.aclose()
                if self._link.worked:
                    pace.restart()
                    log.warning("weights_reconnect", url=address.url, timeout_s=RECONNECT_TIMEOUT_S)
                elif pace.expired:
                    raise PeerLost(f"the publisher at {address.url} ends each connection at once")
                self._link = await reconnected(partial(_Link.open, address), pace)
                self.pause(self._link.layout.pause)
        except (PenstockError, OSError) as error:
            # The key was accepted before: a publisher, or a proxy, that closes new connections has lost its other side.
            reason = "it closed the connection" if isinstance(error, PeerClosed) else str(error)
            last = Reject("PeerLost", f"{self.subscriptions.name} at {address.url} is lost: {reason}")
            log.warning("weights_lost", url=address.url, reason=reason)
        await self.subscriptions.notify_end(last)

    async def aclose(self) -> None:
        """Close the connection to the publisher, and the segment for new subscribers."""
        self.subscriptions.close()
        await self._link.aclose()

    async def _received(self, link: _Link) -> bool:
        """Handle the messages of one connection until it ends; return whether it ended because the publisher closed."""
        with unwrap_single():
            await self._exchange(link)
        return self._final

    async def _exchange(self, link: _Link) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._request, link)
            tasks.start_soon(link.report_counts)
            try:
                while not self._final:
                    await self._handle(await link.receive())
                    self._changed.wake_all()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                pass
            tasks.cancel_scope.cancel()

    async def _handle(self, message: Message) -> None:
        match message:
            case NewVersion(version):
                self._announced = version
            case Chunk():
                await self._store(message)
            case VersionGone(version):
                if self._transfer is not None and self._transfer.version == version:
                    log.warning("weights_overtaken", version=version, latest=self._announced)
                    self._transfer, self._gone = None, version
            case Pause(number):
                self.pause(number)
            case Resume():
                self.pause(0)
            case EndOfWeights():
                self._final = True
            case _:
                reason = printable(message.reason) if isinstance(message, Reject) else type(message).__name__
                raise ProtocolMismatch(f"expected a message of a publisher, got {reason}")

    # -- versions ------------------------------------------------------------------------------------------------------

    async def _request(self, link: _Link) -> None:
        """Request the chunks of each version, until the connection ends."""
        try:
            if self._transfer is not None:
                self._transfer.on_disconnect()
            while True:
                transfer = self._transfer or await self._begun()
                while self._transfer is transfer and not transfer.done:
                    for index in transfer.take():
                        await link.send(ChunkRequest(transfer.version, index))
                    await self._changed.wait()
                if self._transfer is transfer:
                    self._transfer = None
                    self._writer.complete(transfer.version)
                    self.subscriptions.wake_all()
        except anyio.BrokenResourceError:
            pass  # `_received` ends too

    async def _begun(self) -> VersionTransfer:
        """Begin the transfer of the newest version, once there is one and no sampler uses its buffer."""
        while self._announced <= max(self._writer.latest, self._gone):
            await self._changed.wait()
        await self.subscriptions.released(self._writer.sequence - 1)
        self._writer.begin()
        self._transfer = VersionTransfer(self._announced, self._nbytes)
        return self._transfer

    async def _store(self, chunk: Chunk) -> None:
        """Write a chunk into the segment, unless its hash differs."""
        transfer = self._transfer
        if transfer is None or not transfer.expects(chunk):
            return
        intact = await anyio.to_thread.run_sync(transfer.intact, chunk)
        if intact:
            start, _ = span(chunk.index, self._nbytes)
            await anyio.to_thread.run_sync(self._writer.store, start, np.frombuffer(chunk.content, np.uint8))
        else:
            log.warning("chunk_damaged", version=chunk.policy_version, index=chunk.index)
        transfer.on_arrival(chunk.index, intact=intact)
        if transfer.damaged > MOST_DAMAGED:
            raise ProtocolMismatch(
                f"expected chunks with their hashes, got {transfer.damaged} damaged ones of version {transfer.version}"
            )

    # -- pauses --------------------------------------------------------------------------------------------------------

    def pause(self, number: int) -> None:
        """Pause the subscribers for pause `number` of the publisher, or let them sample if it is 0."""
        if self._pausing is not None:
            self._pausing.cancel()
            self._pausing = None
        if number:
            self._pausing = anyio.CancelScope()
            self._tasks.start_soon(self._paused, number, self._pausing)

    async def _paused(self, number: int, scope: anyio.CancelScope) -> None:
        with scope:
            async with self.subscriptions.paused(math.inf):
                with suppress(anyio.BrokenResourceError):  # the next connection begins with the present pause
                    await self._link.send(PauseAck(number))
                await anyio.sleep_forever()


async def run_mirror(source: WeightAddress | FolderReader, *, task_status: TaskStatus[Path]) -> None:
    """Mirror the weights of `source`, unless another process of this host does; report the directory of its socket.

    Returns when the publisher is lost, or one on another host closes.

    Raises:
        NobodyListens, PeerClosed, PeerLost, ProtocolMismatch, StaleHandle: see `_Link.open`; before it reports.
        OutOfSharedMemory: this host has no room for the weights, twice.
        OutOfFileDescriptors: this process has too few left.
        ValueError: the address is one that no host can connect to.
    """
    async with AsyncExitStack() as stack:
        directory, owned = await enter_in_thread(stack, shared_directory(source.mirror))
        if not owned:
            task_status.started(directory)
            return
        available(DESCRIPTORS, "the mirror of this host")
        listening = await enter_in_thread(stack, listening_in(directory))
        url = f"{SCHEME}{directory}"
        async with folder_mirror(source, url) if isinstance(source, FolderReader) else _opened(source, url) as mirror:
            listener = await SocketListener.from_socket(listening)
            async with listener, anyio.create_task_group() as tasks:
                tasks.start_soon(serve_control, listener, mirror.subscriptions.accept, mirror.subscriptions.rejections)
                task_status.started(directory)
                await mirror.follow()
                tasks.cancel_scope.cancel()


@asynccontextmanager
async def _opened(address: WeightAddress, url: str) -> AsyncIterator[WeightMirror]:
    """Connect, and allocate the segment of a mirror; free both after the body."""
    address.check_reachable()
    async with AsyncExitStack() as stack:
        link = await _Link.open(address)
        stack.push_async_callback(link.aclose)
        layout = await anyio.to_thread.run_sync(_parsed, link.layout.header)
        writer = await anyio.to_thread.run_sync(WeightWriter, WritePlan(layout.manifest))
        stack.callback(writer.close)
        tasks = await stack.enter_async_context(anyio.create_task_group())
        mirror = WeightMirror(link, writer, layout.nbytes, url, tasks)
        stack.push_async_callback(mirror.aclose)
        mirror.pause(link.layout.pause)
        yield mirror
        tasks.cancel_scope.cancel()


def _parsed(header: bytes) -> TensorLayout:
    try:
        return TensorLayout.parse(header[LENGTH.size :])
    except ValueError as error:
        raise ProtocolMismatch(f"expected the header of published tensors, got {error}") from None
