"""`WeightSubscriber`: load the newest published weights into a model; the samplers' side.

A subscriber connects to the publisher's control socket, receives its segment of shared memory, to read it without
further messages, and stays connected to be notified of versions, of pauses, and of the publisher's death. It notifies
the publisher of the buffer that its model is views of while it samples, and of the pauses that it confirms. Where the
publisher is on another host, or publishes into a folder, it connects to the mirror of its host instead, and becomes it
if there is none.

    async with WeightSubscriber(url) as subscriber:  # publisher.url
        subscriber.attach(model)
        await subscriber.newer()
        async with subscriber.sampling():
            await anyio.to_thread.run_sync(subscriber.refresh)
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Self

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from ..._schemas import ProtocolMismatch
from ..._schemas.control import (
    PROTOCOL_VERSION,
    EndOfWeights,
    Message,
    Pause,
    PauseAck,
    Reject,
    Resume,
    Subscribe,
    ViewsInUse,
    Weights,
    check_name,
)
from ..channels.control_connection import BACKLOG_RETRY_S, ControlConnection
from ..channels.socket_directory import sweep_after
from ..errors import NobodyListens, PeerClosed, PeerLost, PenstockError, StaleHandle, WeightsDamaged
from ..util.checkpoint import FOLDER_SCHEME
from ..util.file_descriptors import available
from ..util.host import host_identity
from ..util.retry_pace import RetryPace
from ..util.waiting import Waiters
from .folder_mirror import FolderReader
from .weight_address import WeightAddress
from .weight_connection import SCHEME, connect_publisher, directory_of
from .weight_copies import CopiedModel, PrivateCopy, attached
from .weight_reconnection import RECONNECT_TIMEOUT_S, reconnected
from .weight_specs import FusedTensor, Tensor
from .weights import NO_VERSION, WeightReader

if TYPE_CHECKING:
    from torch import nn

    from .weight_views import MappedModel

ENDS = {error.__name__: error for error in (StaleHandle, WeightsDamaged)}
"""Errors that a mirror ends a subscription with, beside `PeerLost`."""

DESCRIPTORS = 6
"""File descriptors that subscribing takes: the socket, the segment, and temporary ones."""


class WeightSubscriber:
    """The weights of a publisher in another process (or in this one), and a model to load them into."""

    def __init__(self, url: str | WeightAddress, *, name: str | None = None) -> None:
        """Prepare to subscribe.

        Args:
            url: `WeightPublisher.url`, on the publisher's host; the address that `WeightPublisher.serve` yields; or
                `WeightFolder.url`.
            name: of this subscriber, for messages.
        """
        self.url: str = url if isinstance(url, str) else url.url
        self.name: str = check_name(name or f"subscriber in process {os.getpid()}")
        self._mirrored: WeightAddress | FolderReader | None = None if isinstance(url, str) else url
        """The weights that this host has a mirror of; None for those of a publisher on this host."""
        self._local = self.url
        """The URL to connect to, on this host."""
        self._stack = AsyncExitStack()
        self._tasks: TaskGroup
        self._reader: WeightReader | None = None
        self._publisher = self.url
        self._target: CopiedModel | MappedModel | None = None
        """The attached model or tensors."""
        self._source: PrivateCopy | WeightReader | None = None
        """Reads versions for the target. Those of a folder are copied into tensors without `PrivateCopy`: a copy takes
        less time than the mirror needs to read two versions, and one that was overwritten is made again."""
        self._version = NO_VERSION
        self._held = 0
        """The publication that the model is views of; 0 without one."""
        self._held_in: WeightReader | None = None
        """The segment of that publication: of the mirror that died, until a new one has a newer version."""
        self._reported_held = 0
        """The publication that the publisher was last notified of as held."""
        self._failure: PenstockError | None = None
        self._final = False
        self._pause = 0
        """Number of the present pause; 0 without one."""
        self._confirmed = 0
        self._active = 0
        """Bodies of `sampling` that run."""
        self._joining = False
        """True while it waits to connect to another mirror, because its own died."""
        self._changed = Waiters()
        """Wakes tasks that wait for a version or for the end of a pause."""
        self._to_send = Waiters()
        """Wakes the task that sends messages to the publisher."""
        self._loop: asyncio.AbstractEventLoop

    def __repr__(self) -> str:
        state = "lost" if self._failure else "final" if self._final else "paused" if self._pause else "open"
        return f"<WeightSubscriber {self.url} {state}: version {self._version} of {self.latest}>"

    async def __aenter__(self) -> Self:
        """Connect, and map the publisher's segment.

        Raises:
            NobodyListens: there is no publisher at `url`, or it is unresponsive.
            ProtocolMismatch: it rejected the subscriber, with its reason.
            PeerLost: it died or closed meanwhile.
            PeerClosed: the publisher, on another host, has another key.
            StaleHandle: another publisher answers, on another host.
            OutOfSharedMemory: this host has no room for weights of another host or a folder, twice.
            OutOfFileDescriptors: this process has too few left.
            InvalidConfig: `url` is not one of a publisher, or an address without a host to connect to.
        """
        available(DESCRIPTORS, "a subscriber to weights")
        self._loop = asyncio.get_running_loop()
        if self.url.startswith(FOLDER_SCHEME):
            self._mirrored = await to_thread.run_sync(FolderReader, self.url)
        elif isinstance(far := self._mirrored, WeightAddress) and far.host == await to_thread.run_sync(host_identity):
            self._local, self._mirrored = far.local, None
        stack = AsyncExitStack()
        try:
            connections = await stack.enter_async_context(AsyncExitStack())  # closed when no task receives any more
            self._tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(self._tasks.cancel_scope.cancel)
            connection, self._reader = await self._connected()
            await connections.enter_async_context(connection)
            self._tasks.start_soon(self._follow, connection)
        except BaseException:  # not `async with`: the task group would wrap it
            await stack.aclose()
            raise
        self._stack = stack
        return self

    async def __aexit__(self, *_: object) -> None:
        """Disconnect. The model keeps its weights."""
        await self._stack.aclose()

    async def _connected(self) -> tuple[ControlConnection, WeightReader]:
        """Connect to the publisher, or to this host's mirror of it, and map the segment."""
        while True:
            connection = await self._connection()
            try:
                with anyio.fail_after(RECONNECT_TIMEOUT_S):
                    await connection.send(Subscribe(PROTOCOL_VERSION, self.name, os.getpid()))
                    return connection, await self._handshake(connection)
            except TimeoutError:
                await connection.aclose()
                raise NobodyListens(
                    f"expected the publisher at {self.url} to answer, got no answer for "
                    f"{RECONNECT_TIMEOUT_S:g} s: is its process stopped, or its event loop blocked?"
                ) from None
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                await connection.aclose()
                if self._mirrored is None:  # else it was a mirror, and another takes its place
                    raise PeerLost(
                        f"the publisher at {self.url} closed the connection before it sent weights"
                    ) from None
            except BaseException:
                await connection.aclose()
                raise

    async def _connection(self) -> ControlConnection:
        """Connect to the socket of the publisher; or of this host's mirror, after becoming it if there is none."""
        if self._mirrored is None:
            return await connect_publisher(self._local)
        from .weight_mirror import run_mirror  # noqa: PLC0415 (only samplers on other hosts receive weights over tcp)

        while True:
            directory = await self._tasks.start(run_mirror, self._mirrored)
            self._local = f"{SCHEME}{directory}"
            with suppress(NobodyListens):  # another process is about to listen there, or to end
                return await connect_publisher(self._local)
            await anyio.sleep(BACKLOG_RETRY_S)

    async def _handshake(self, connection: ControlConnection) -> WeightReader:
        message = await connection.receive()
        if isinstance(message, Reject):
            raise ProtocolMismatch(f"the publisher at {self.url} refused: {message.reason}")
        fd = connection.take_fd()
        if not isinstance(message, Weights) or fd is None:
            raise ProtocolMismatch(f"expected Weights with a file descriptor, got {type(message).__name__}")
        with ExitStack() as stack:
            stack.callback(os.close, fd)
            self._publisher, self._pause, self._confirmed = message.name, message.pause, message.pause
            return await to_thread.run_sync(WeightReader, fd, message.nbytes, message.generation, message.device)

    # -- weights -------------------------------------------------------------------------------------------------------

    @property
    def latest(self) -> int:
        """The newest version that was published; −1 before the first. Read from memory, without a system call."""
        return max(self._reader.latest, self._version) if self._reader else NO_VERSION

    @property
    def version(self) -> int:
        """Return the version that the attached tensors hold; −1 before the first `refresh`."""
        return self._version

    @property
    def device(self) -> str:
        """The device of the published versions: a model on it, or on the meta device, can be views of them."""
        return self._opened().memory.device

    def attach(
        self, model: nn.Module | Mapping[str, Tensor], *, fused: Iterable[FusedTensor] = (), copied: bool = False
    ) -> None:
        """Attach the model that `refresh` loads the newest version into.

        Args:
            model: a module: its parameters and persistent buffers become views of the published memory, without a
                second copy, read-only, without gradients. It may have been built on the meta device. Its non-persistent
                buffers stay its own. Or tensors by name (a `state_dict`, numpy arrays), which are filled in place.
            fused: published tensors that the model has in several pieces.
            copied: fill the tensors of a module in place too, on any device.

        Raises:
            WeightsMismatch: a published tensor differs in name, dtype or shape, lies on another device, or is tied
                where the model's is not; a non-persistent buffer differs from that of the published module; or a
                model on the meta device cannot be completed. Lists every difference; the model was not changed.
            InvalidConfig: a value is no tensor.
        """
        reader, whose = self._opened(), f"weights of {self._publisher} do not fit the model"
        target = attached(model, reader.layout.manifest, fused, whose, device=self.device, copied=copied)
        twice = isinstance(target, CopiedModel) and not isinstance(self._mirrored, FolderReader)
        self._source = PrivateCopy(reader, whose) if twice else reader
        self._target = target
        self._version, self._held = NO_VERSION, 0

    def detach(self) -> None:
        """Release the attached model, and the private memory for its copies."""
        self._target, self._source = None, None

    def refresh(self) -> int:
        """Load the newest version into the attached model, if it is older or not `intact`; return its version.

        May block: call it in a worker thread, while no other thread samples from the model. The tensors never hold a
        mixture. If the publisher overwrites every copy before it is complete, they stay as they were.

        Raises:
            PeerLost, StaleHandle, WeightsDamaged: see `newer`; the tensors hold the last version before.
            RuntimeError: no model is attached.
        """
        reader, source = self._opened(), self._source
        if self._target is None or source is None:
            raise RuntimeError("expected tensors to refresh, got none: call attach(model) first")
        if self._failure is not None and not reader.memory.stays:
            raise self._failure
        if reader.latest > self._version or not self.intact:
            while (read := source.read()) is not None:
                publication, tensors = read
                self._target.load(tensors)
                self._version, self._held_in = publication.version, reader
                self._held = 0 if isinstance(self._target, CopiedModel) else publication.sequence
                self._loop.call_soon_threadsafe(self._to_send.wake_all)
                if source is not reader or reader.intact(publication.sequence):
                    break
        elif self._failure is not None:
            raise self._failure
        return self._version

    @property
    def intact(self) -> bool:
        """Return whether all results of the model since `refresh` were computed with one version. Reads memory.

        False where the model is views, and the publisher has overwritten the version after `release_timeout_s`, or has
        closed and freed its memory: discard the samples, and refresh.
        """
        reader = self._held_in
        if not self._held or reader is None:
            return True
        return reader.intact(self._held) and (self._failure is None or reader.memory.stays)

    @property
    def stale(self) -> bool:
        """Return whether `refresh` would load a newer version, or raise. Reads memory."""
        return self.latest > self._version or self._failure is not None

    async def newer(self, than: int | None = None) -> int:
        """Wait until a version above `than` is published (by default above the one the tensors hold); return it.

        Raises:
            PeerLost: the publisher died.
            PeerClosed: the publisher closed; its last version is not newer.
            StaleHandle: another publisher has taken the folder.
            WeightsDamaged: a version in the folder is torn, absent or altered.
        """
        bound = self._version if than is None else than
        self._opened()
        while self.latest <= bound:
            self._check()
            if self._final:
                raise PeerClosed(f"{self._publisher} closed at version {self.latest}: nothing above {bound} will come")
            await self._changed.wait()
        return self.latest

    def _opened(self) -> WeightReader:
        if self._reader is None:
            raise RuntimeError(f"expected an open subscriber, got {self!r}: use it within `async with`")
        return self._reader

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    # -- pausing -------------------------------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        """Return whether the publisher has paused sampling."""
        return bool(self._pause)

    @asynccontextmanager
    async def sampling(self) -> AsyncIterator[None]:
        """Allow sampling within the body: entering waits while the publisher pauses, and the pause waits for the body.

        The body must be as short as a pause may wait for it: one batch of completions, or one token.

        Raises:
            PeerLost, StaleHandle, WeightsDamaged: see `newer`.
        """
        while self._pause or self._joining:
            self._check()
            await self._changed.wait()
        self._check()
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1
            self._to_send.wake_all()

    # -- connection ----------------------------------------------------------------------------------------------------

    async def _follow(self, connection: ControlConnection) -> None:
        """Handle the messages of the publisher until it closes or dies; of mirrors, one after the other."""
        following: ControlConnection | None = connection
        while following is not None:
            async with following, anyio.create_task_group() as tasks:
                self._reported_held = 0
                tasks.start_soon(self._send, following)
                await self._receive(following)
                tasks.cancel_scope.cancel()
            following = None if self._final or self._failure is not None else await self._rejoined()
        self._changed.wake_all()
        if self._failure is not None:
            await to_thread.run_sync(sweep_after, directory_of(self._local))

    async def _receive(self, connection: ControlConnection) -> None:
        """Handle the messages of one connection."""
        try:
            while not self._final:
                self._handle(await connection.receive())
            if not self._opened().memory.stays:
                self._failure = PeerLost(f"{self._publisher} closed, and its memory on {self.device} with it")
        except anyio.EndOfStream:
            if self._mirrored is None:
                self._failure = PeerLost(f"{self._publisher} at {self.url} died: it closed the connection")
        except (PeerLost, StaleHandle, WeightsDamaged) as error:
            self._failure = error
        except ProtocolMismatch as error:
            self._failure = PeerLost(f"{self._publisher} at {self.url} broke the protocol: {error}")
        self._changed.wake_all()

    async def _rejoined(self) -> ControlConnection | None:
        """Connect to another mirror, because that of this host has ended; None if the publisher is lost too.

        Waits until no body of `sampling` runs: the new mirror takes its subscribers for paused if it is.
        """
        self._joining = True
        try:
            while self._active:
                await self._to_send.wait()
            connection, reader = await reconnected(self._connected, RetryPace(RECONNECT_TIMEOUT_S))
            if reader.layout.header != self._opened().layout.header:
                await connection.aclose()
                raise ProtocolMismatch("expected the same tensors from another mirror, got others")
            if isinstance(self._source, PrivateCopy):
                self._source = PrivateCopy(reader, self._publisher)
            elif self._source is not None:
                self._source = reader
            self._reader = reader
        except (PenstockError, OSError) as error:
            self._failure = PeerLost(f"{self._publisher} at {self.url} is lost: {error}")
            return None
        finally:
            self._joining = False
            self._changed.wake_all()
        return connection

    def _handle(self, message: Message) -> None:
        if isinstance(message, Reject):
            raise ENDS.get(message.error, PeerLost)(message.reason)
        if isinstance(message, Pause):
            self._pause = message.number
        elif isinstance(message, Resume | EndOfWeights):
            self._pause = 0
            self._final = isinstance(message, EndOfWeights)
        self._to_send.wake_all()
        self._changed.wake_all()

    async def _send(self, connection: ControlConnection) -> None:
        """Notify the publisher of the buffer that it must not write to, and confirm each pause."""
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):  # disconnected: `_receive` ends too
            while True:
                if (held := self._holding()) != self._reported_held:
                    self._reported_held = held
                    await connection.send(ViewsInUse(held))
                elif self._active or self._pause in {0, self._confirmed}:
                    await self._to_send.wait()
                else:
                    self._confirmed = self._pause
                    await connection.send(PauseAck(self._confirmed))

    def _holding(self) -> int:
        """Return the publication that the publisher must not overwrite; 0 without one.

        A subscriber that does not sample releases it when there is a newer one, or when the publisher closes.
        """
        newest = self._opened().newest()
        if self._held_in is not self._reader:
            return 0
        is_newest = newest is not None and newest.sequence == self._held
        return self._held if self._active or (is_newest and not self._final) else 0
