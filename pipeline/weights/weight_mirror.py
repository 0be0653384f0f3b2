"""The mirror of a publisher on another host: one process of each host receives every version, once, and shares it.

It requests the chunks of a version over tcp, or where it has a version the changes since then, checks hashes, writes
into a segment of shared memory like the publisher's, and serves subscribers of its host like the publisher does those
of its own. So models are views here too, and a pause reaches every sampler: the mirror confirms it when all of its
subscribers have.

A connection that ends is made again, as often as it takes for `RECONNECT_TIMEOUT_S`, and the transfer continues where
it stopped, or with the newest version. If that fails, the subscribers are notified that the publisher is lost.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import numpy as np
from anyio.abc import SocketListener, TaskGroup, TaskStatus

from ..._schemas import ProtocolMismatch
from ..._schemas.control import (
    Chunk,
    EndOfWeights,
    Message,
    NewVersion,
    NoDelta,
    Pause,
    PauseAck,
    Reject,
    Resume,
    SpanDelta,
    VersionGone,
    printable,
)
from ..accounting.telemetry import get_logger
from ..channels.control_connection import serve_control
from ..channels.socket_directory import shared_directory
from ..errors import PeerClosed, PeerLost, PenstockError
from ..util.blocking import enter_in_thread
from ..util.exception_groups import unwrap_single
from ..util.file_descriptors import available
from ..util.retry_pace import RetryPace
from ..util.waiting import Waiters
from .folder_mirror import FolderReader, folder_mirror
from .span_delta import apply_delta
from .tensor_layout import LENGTH, TensorLayout, WritePlan
from .weight_address import WeightAddress
from .weight_connection import SCHEME, listening_in
from .weight_link import WeightLink
from .weight_reconnection import RECONNECT_TIMEOUT_S, reconnected
from .weight_subscriptions import RELEASE_TIMEOUT_S, Subscriptions
from .weight_transfer import MOST_DAMAGED, VersionTransfer, digest, extent, span_extent
from .weights import NO_VERSION, WeightWriter

log = get_logger("penstock.weights")

DESCRIPTORS = 24
"""File descriptors that a mirror takes: two sockets, a segment, temporary ones, and those of ZeroMQ itself, once."""


class WeightMirror:
    """Receives the versions of a publisher into a segment of this host, and serves subscribers."""

    def __init__(self, link: WeightLink, writer: WeightWriter, nbytes: int, url: str, tasks: TaskGroup) -> None:
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
                self._link = await reconnected(partial(WeightLink.open, address), pace)
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

    async def _received(self, link: WeightLink) -> bool:
        """Handle the messages of one connection until it ends; return whether it ended because the publisher closed."""
        with unwrap_single():
            await self._exchange(link)
        return self._final

    async def _exchange(self, link: WeightLink) -> None:
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
            case Chunk() | SpanDelta() | NoDelta():
                await self._on_answer(message)
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

    async def _request(self, link: WeightLink) -> None:
        """Request the changes or the chunks of each version, until the connection ends."""
        try:
            if self._transfer is not None:
                self._transfer.on_disconnect()
            while True:
                transfer = self._transfer or await self._begun()
                while self._transfer is transfer and not transfer.done:
                    for request in transfer.take():
                        await link.send(request)
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
        base = None if self._writer.latest == NO_VERSION else self._writer.latest
        self._transfer = VersionTransfer(self._announced, self._nbytes, base)
        return self._transfer

    async def _on_answer(self, answer: Chunk | SpanDelta | NoDelta) -> None:
        """Write a chunk, or a span by its delta, into the segment, unless its hash differs."""
        transfer = self._transfer
        if transfer is None or not transfer.expects(answer):
            return
        if isinstance(answer, NoDelta):
            transfer.on_no_delta(answer.index)
        elif isinstance(answer, SpanDelta):
            intact = await anyio.to_thread.run_sync(self._changed_span, answer)
            transfer.on_delta(answer, intact=intact)
        else:
            intact = await anyio.to_thread.run_sync(self._stored, transfer, answer)
            transfer.on_chunk(answer.index, intact=intact)
        if transfer.damaged > MOST_DAMAGED:
            raise ProtocolMismatch(
                f"expected chunks with their hashes, got {transfer.damaged} damaged ones of version {transfer.version}"
            )

    def _stored(self, transfer: VersionTransfer, chunk: Chunk) -> bool:
        """Write a chunk into the segment; return whether it has its hash, else it was not written."""
        intact = transfer.intact(chunk)
        if intact:
            start, _ = extent(chunk.index, self._nbytes)
            self._writer.store(start, np.frombuffer(chunk.content, np.uint8))
        else:
            log.warning("chunk_damaged", version=chunk.policy_version, index=chunk.index)
        return intact

    def _changed_span(self, delta: SpanDelta) -> bool:
        """Write a span of the newest version, changed, into the segment; return whether it has its hash."""
        start, end = span_extent(delta.index, self._nbytes)
        base, span = self._writer.spans(start, end)
        try:
            apply_delta(delta.content, base, span)
        except ValueError as error:
            reason = str(error)
        else:
            if digest(span.data, delta.policy_version, delta.index) == delta.xxh3:
                return True
            reason = "expected another hash: the delta, or this host's version before, was altered"
        log.warning("delta_damaged", version=delta.policy_version, index=delta.index, reason=reason)
        return False

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
        NobodyListens, PeerClosed, PeerLost, ProtocolMismatch, StaleHandle: see `WeightLink.open`; before it reports.
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
        link = await WeightLink.open(address)
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
