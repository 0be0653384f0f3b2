"""`WeightSubscriber`: load the newest published weights into a model; the samplers' side.

A subscriber connects to the publisher's control socket, receives its segment of shared memory, which it reads without
further messages, and stays connected to be notified of versions, of pauses, and of the publisher's death. It notifies
the publisher of the buffer that its model is views of while it samples, and of the pauses that it confirms.

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
import anyio.to_thread

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
from ..channels.control_connection import ControlConnection
from ..channels.heartbeat import DEFAULT_HEARTBEAT_TIMEOUT_S
from ..channels.socket_directory import sweep_after
from ..errors import NobodyListens, PeerClosed, PeerLost
from ..util.file_descriptors import available
from ..util.waiting import Waiters
from .weight_connection import connect_publisher, directory_of
from .weight_copies import CopiedModel, PrivateCopy, attached
from .weight_specs import FusedTensor, Tensor
from .weights import NO_VERSION, WeightReader

if TYPE_CHECKING:
    from torch import nn

    from .weight_views import MappedModel

DESCRIPTORS = 6
"""File descriptors that subscribing takes: the socket, the segment, and temporary ones."""


class WeightSubscriber:
    """The weights of a publisher in another process (or in this one), and a model into which they are loaded."""

    def __init__(self, url: str, *, name: str | None = None) -> None:
        """Prepare to subscribe at `url`; `name` is that of this subscriber, for messages."""
        self.url = url
        self.name: str = check_name(name or f"subscriber in process {os.getpid()}")
        self._stack = AsyncExitStack()
        self._reader: WeightReader | None = None
        self._publisher = url
        self._target: CopiedModel | MappedModel | None = None
        """The attached model or tensors."""
        self._source: PrivateCopy | WeightReader | None = None
        """Reads versions for the target."""
        self._version = NO_VERSION
        self._held = 0
        """The publication that the model is views of; 0 for none."""
        self._reported_held = 0
        """The publication that the publisher was last notified of as held."""
        self._failure: PeerLost | None = None
        self._final = False
        self._pause = 0
        """Number of the present pause; 0 for none."""
        self._confirmed = 0
        self._active = 0
        """Bodies of `sampling` that run."""
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
            OutOfFileDescriptors: this process has too few left.
        """
        available(DESCRIPTORS, "a subscriber to weights")
        self._loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            try:
                with anyio.fail_after(DEFAULT_HEARTBEAT_TIMEOUT_S):
                    connection = await stack.enter_async_context(await connect_publisher(self.url))
                    await connection.send(Subscribe(PROTOCOL_VERSION, self.name, os.getpid()))
                    self._reader = await self._handshake(connection)
            except TimeoutError:
                raise NobodyListens(
                    f"expected the publisher at {self.url} to answer, got no answer for "
                    f"{DEFAULT_HEARTBEAT_TIMEOUT_S:g} s: is its process stopped, or its event loop blocked?"
                ) from None
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                raise PeerLost(f"the publisher at {self.url} closed the connection before it sent weights") from None
            tasks = await stack.enter_async_context(anyio.create_task_group())
            tasks.start_soon(self._receive, connection)
            tasks.start_soon(self._send, connection)
            stack.callback(tasks.cancel_scope.cancel)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Disconnect. The model keeps its weights."""
        await self._stack.aclose()

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
            return await anyio.to_thread.run_sync(WeightReader, fd, message.nbytes, message.generation, message.device)

    # -- weights -------------------------------------------------------------------------------------------------------

    @property
    def latest(self) -> int:
        """The newest version that was published; −1 before the first. Read from memory, without a system call."""
        return self._reader.latest if self._reader else NO_VERSION

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
        """Attach the model into which `refresh` loads the newest version.

        Args:
            model: a module, whose parameters and persistent buffers become views of the published memory: without a
                second copy, read-only, without gradients. It may have been built on the meta device. Its non-persistent
                buffers stay its own. Or tensors by name (a `state_dict`, numpy arrays), which are filled in place.
            fused: published tensors that the model has in several pieces.
            copied: fill the tensors of a module in place too, on any device.

        Raises:
            WeightsMismatch: a published tensor differs in name, dtype or shape, lies on another device, or is tied
                where the model's is not; a non-persistent buffer differs from that of the published module; or a
                model on the meta device cannot be completed. Lists every difference; the model was not changed.
            TypeError: a value is no tensor.
        """
        reader, whose = self._opened(), f"weights of {self._publisher} do not fit the model"
        target = attached(model, reader.layout.manifest, fused, whose, device=self.device, copied=copied)
        self._source = PrivateCopy(reader, whose) if isinstance(target, CopiedModel) else reader
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
            PeerLost: the publisher died, and the tensors hold its last version.
            RuntimeError: no model is attached.
        """
        reader = self._opened()
        if self._target is None or self._source is None:
            raise RuntimeError("expected tensors to refresh, got none: call attach(model) first")
        if self._failure is not None and not reader.memory.stays:
            raise self._failure
        if reader.latest > self._version or not self.intact:
            read = self._source.read()
            if read is not None:
                publication, tensors = read
                self._target.load(tensors)
                self._version = publication.version
                self._held = publication.sequence if self._source is reader else 0
                self._loop.call_soon_threadsafe(self._to_send.wake_all)
        elif self._failure is not None:
            raise self._failure
        return self._version

    @property
    def intact(self) -> bool:
        """Return whether all results of the model since `refresh` were computed with one version. Reads memory.

        False where the model is views, and the publisher has overwritten the version after `release_timeout_s`, or has
        closed and freed its memory: discard the samples, and refresh.
        """
        reader = self._opened()
        return not self._held or (reader.intact(self._held) and (self._failure is None or reader.memory.stays))

    @property
    def stale(self) -> bool:
        """Return whether `refresh` would load a newer version, or raise. Reads memory."""
        return self.latest > self._version or self._failure is not None

    async def newer(self, than: int | None = None) -> int:
        """Wait until a version above `than` is published (by default above the one the tensors hold); return it.

        Raises:
            PeerLost: the publisher died.
            PeerClosed: the publisher closed; its last version is not newer.
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
            PeerLost: the publisher died.
        """
        while self._pause:
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

    async def _receive(self, connection: ControlConnection) -> None:
        """Handle the publisher's messages, until it closes or dies."""
        try:
            while not self._final:
                self._handle(await connection.receive())
            if not self._opened().memory.stays:
                self._failure = PeerLost(f"{self._publisher} closed, and its memory on {self.device} with it")
        except anyio.EndOfStream:
            self._failure = PeerLost(f"{self._publisher} at {self.url} died: it closed the connection")
        except ProtocolMismatch as error:
            self._failure = PeerLost(f"{self._publisher} at {self.url} broke the protocol: {error}")
        self._changed.wake_all()
        if self._failure is not None:
            await anyio.to_thread.run_sync(sweep_after, directory_of(self.url))

    def _handle(self, message: Message) -> None:
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
        """Return the publication that the publisher must not overwrite; 0 for none.

        A subscriber that does not sample releases it when there is a newer one, or when the publisher closes.
        """
        newest = self._opened().newest()
        is_newest = newest is not None and newest.sequence == self._held
        return self._held if self._active or (is_newest and not self._final) else 0
