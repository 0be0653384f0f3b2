"""The trainer's end of the way that weights take: versions are published to whoever subscribed.

The publisher owns a segment of shared memory (`weights`) and a door (`weight_door`). A subscriber that knocks is handed
the segment and stays connected: it hears of new versions, is asked to pause, and knows at once when the publisher dies,
as the publisher knows of it. Nothing on the socket is unpickled.

    async with WeightPublisher(model) as publisher:
        await publisher.publish(model.state_dict(), version=0)
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import anyio
import anyio.to_thread
from anyio.abc import SocketListener, TaskGroup

from ..._schemas import ProtocolMismatch
from ..._schemas.control import (
    PROTOCOL_VERSION,
    EndOfWeights,
    Message,
    NewVersion,
    Pause,
    PauseAck,
    Reject,
    Resume,
    Subscribe,
    ViewsInUse,
    Weights,
    check_name,
)
from ..._schemas.numbers import finite_number
from ..blocking import enter_in_thread
from ..channels.control_connection import ControlConnection, serve_control
from ..file_descriptors import available
from ..telemetry import get_logger
from ..waiting import Waiters
from .engine_sync import Syncable, synced
from .weight_connection import listening_socket
from .weight_specs import FusedTensor, Tensor, manifest_of
from .weights import NO_VERSION, WeightWriter
from .write_plan import WritePlan

if TYPE_CHECKING:
    from torch import nn

__all__ = ["WeightPublisher"]

log = get_logger("penstock.weights")

DESCRIPTORS = 8
"""File descriptors that opening takes: the segment, the socket and its folder, and what is open for a moment."""

INTRODUCTION_S = 10.0
"""Whoever knocks has this long to say who they are."""

CLOSE_TIMEOUT_S = 1.0
"""How long a publisher that closes waits for its subscribers to be told."""

PAUSE_TIMEOUT_S = 60.0
"""How long subscribers have to stop sampling: longer than a long completion takes."""

RELEASE_TIMEOUT_S = 60.0
"""How long a buffer that is sampled from is not written to: as long as a pause is waited for, for the same reason."""


E = TypeVar("E", bound=Syncable)


@dataclass(slots=True, eq=False)
class _Listener:
    """A subscriber, as the publisher sees it: what it was told last, and what it confirmed."""

    name: str
    connection: ControlConnection
    told_version: int
    told_pause: int
    """Number of the pause it was told of; 0 once it was told to resume."""
    confirmed: int
    """Number of the last pause in which it stopped."""
    holding: int = 0
    """The publication whose buffer it samples from; 0 for none."""
    told_final: bool = False
    bell: Waiters = field(default_factory=Waiters)
    """Wakes the task that tells it news."""


class WeightPublisher:
    """Publishes versions of one set of tensors to any number of subscribers on this host.

    A subscriber that copies never holds up `publish`. One whose model is views is given `release_timeout_s` to end the
    batch that it samples, and to be pointed to what is newer; one that is dead is not waited for, and what one samples
    that is stuck is void.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, Tensor],
        *,
        fused: Iterable[FusedTensor] = (),
        cast: Mapping[str, str] = MappingProxyType({}),
        device: str = "cpu",
        release_timeout_s: float = RELEASE_TIMEOUT_S,
        name: str | None = None,
    ) -> None:
        """Prepare for tensors like these; they are not published yet.

        Args:
            model: the module whose `state_dict` will be published. What no state_dict holds, its non-persistent buffers
                as they are now, is not published: samplers whose own differ are refused. Or names, dtypes and shapes of
                all that will be published, a `state_dict`: then nobody compares those buffers. Tied tensors are
                published under each of their names, and lie there once.
            fused: tensors that the samplers' models have in one piece.
            cast: dtypes that are published as another one: `{"float32": "bfloat16"}`. Nothing else is ever cast.
            device: where the versions lie: "cpu", or "cuda:0" for samplers on that device.
            release_timeout_s: how long `publish` waits for a sampler to leave the buffer that is to be written next.
            name: who this is, for messages.

        Raises:
            InvalidConfig: seconds that are not finite.
            TypeError: a value is no tensor, or has a dtype that does not travel; or a buffer is on the meta device.
            WeightsMismatch: `fused` does not fit the tensors.
            ValueError: `cast` names a dtype that does not travel.
        """
        self._plan = WritePlan(manifest_of(model), fused, cast)
        self._device = device
        self._release_timeout_s = finite_number("release_timeout_s", release_timeout_s, zero=True)
        self.name: str = check_name(name or f"publisher in process {os.getpid()}")
        self._url = ""
        self._writer: WeightWriter | None = None
        self._listeners: set[_Listener] = set()
        self._publishing = anyio.Lock()
        self._pause = 0
        """Number of the pause that is on; 0 where none is."""
        self._pauses = 0
        """Pauses so far; each has a number of its own, so that a late confirmation is not taken for a new one."""
        self._holders = 0
        """Bodies of `paused` that run or wait."""
        self._final = False
        self._changed = Waiters()
        """Wakes whoever waits for a listener to confirm, or to leave."""
        self._stack = AsyncExitStack()

    def __repr__(self) -> str:
        state = "paused" if self._pause else "open" if self._writer else "closed"
        return f"<WeightPublisher {self._url} {state}: version {self.version}, {len(self._listeners)} subscribers>"

    async def __aenter__(self) -> Self:
        """Allocate the segment and open the door.

        Raises:
            OutOfSharedMemory: the machine has no room for the weights, twice.
            NoDevice: this process cannot use `device`.
            OutOfFileDescriptors: this process has too few left.
            DiskFull, NotWritable: the folder for the socket cannot be written; the message names it.
        """
        available(DESCRIPTORS, "a publisher of weights")
        async with AsyncExitStack() as stack:
            self._writer = await anyio.to_thread.run_sync(WeightWriter, self._plan, self._device)
            stack.callback(self._close)
            self._url, connection = await enter_in_thread(stack, listening_socket())
            listener = await stack.enter_async_context(await SocketListener.from_socket(connection))
            tasks = await stack.enter_async_context(anyio.create_task_group())
            tasks.start_soon(serve_control, listener, self._attend, self._refused)
            stack.push_async_callback(self._part, tasks)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Tell every subscriber that there will be nothing newer, and close. They keep what they have."""
        await self._stack.aclose()

    @property
    def url(self) -> str:
        """Where subscribers find it, while it is open."""
        return self._url

    @property
    def version(self) -> int:
        """Return the newest version that was published; −1 before the first."""
        return self._writer.latest if self._writer else NO_VERSION

    @property
    def subscribers(self) -> list[str]:
        """Names of those who are connected."""
        return sorted(listener.name for listener in self._listeners)

    async def publish(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Make `tensors` the newest weights. Copies in a worker thread; cancelled, it has published all or nothing.

        Waits, up to `release_timeout_s`, for models that are views of the version before the last to be pointed to the
        last.

        Args:
            tensors: the same names, dtypes and shapes as at construction; not changed by anyone until this returns.
            version: the optimizer step that made them; above every version before.

        Raises:
            WeightsMismatch: the tensors are others than at construction; lists them all.
            ValueError: `version` is not newer than the last.
            anyio.ClosedResourceError: the publisher is not open.
        """
        async with self._publishing:
            writer = self._opened()
            check = partial(self._plan.check, newest=writer.latest)
            await anyio.to_thread.run_sync(check, tensors, version)
            await self._left(writer.sequence - 1)
            try:
                await anyio.to_thread.run_sync(writer.write, tensors, version)
            finally:
                self._ring()

    async def _left(self, sequence: int) -> None:
        """Return when nobody samples from publication `sequence`, or was given the time to end it."""
        with anyio.move_on_after(self._release_timeout_s):
            while self._holders_of(sequence):
                await self._changed.wait()
        for listener in self._holders_of(sequence):
            log.warning(
                "weights_overwritten_in_use",
                url=self._url,
                subscriber=listener.name,
                release_timeout_s=self._release_timeout_s,
            )
            listener.holding = 0

    def _holders_of(self, sequence: int) -> list[_Listener]:
        return [listener for listener in self._listeners if 0 < listener.holding <= sequence]

    @asynccontextmanager
    async def paused(self, pause_timeout_s: float = PAUSE_TIMEOUT_S) -> AsyncIterator[None]:
        """Within the body no subscriber samples: each has stopped and said so. Sampling goes on when the body ends.

        A subscriber that dies is not waited for; one that joins meanwhile joins paused.

        Raises:
            TimeoutError: a subscriber did not stop within `pause_timeout_s`; the message names it. Sampling goes on.
        """
        self._holders += 1
        if self._holders == 1:
            self._pauses += 1
            self._pause = self._pauses
            self._ring()
        try:
            await self._all_stopped(finite_number("pause_timeout_s", pause_timeout_s, zero=True))
            yield
        finally:
            self._holders -= 1
            if not self._holders:
                self._pause = 0
                self._ring()

    def sync(self, engine: E) -> AbstractAsyncContextManager[E]:
        """Within the body `engine` is awake and has the newest version; after it, however it ends, it sleeps.

        See `engine_sync.synced` for what entering and leaving may raise.
        """
        return synced(self, engine)

    async def _all_stopped(self, pause_timeout_s: float) -> None:
        with anyio.move_on_after(pause_timeout_s):
            while self._sampling():
                await self._changed.wait()
        if names := self._sampling():
            raise TimeoutError(
                f"expected every subscriber to stop sampling within {pause_timeout_s} s, {names} did not"
            )

    def _sampling(self) -> list[str]:
        """Who has not confirmed the pause that is on."""
        return sorted(listener.name for listener in self._listeners if listener.confirmed != self._pause)

    def _opened(self) -> WeightWriter:
        if self._writer is None:
            raise anyio.ClosedResourceError
        return self._writer

    # -- the door ------------------------------------------------------------------------------------------------------

    async def _attend(self, connection: ControlConnection) -> None:
        """Serve one subscriber for as long as it lives."""
        try:
            listener = await self._introduced(connection)
            if listener is not None:
                await self._stay_with(listener)
        except ProtocolMismatch as error:
            self._refused(str(error))
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            pass

    def _refused(self, reason: str) -> None:
        log.warning("subscriber_rejected", url=self._url, reason=reason)

    async def _introduced(self, connection: ControlConnection) -> _Listener | None:
        """Let a subscriber in and hand it the segment; None if it may not come in."""
        with anyio.move_on_after(INTRODUCTION_S):
            said = await connection.receive()
            if not isinstance(said, Subscribe):
                raise ProtocolMismatch(f"expected Subscribe, got {type(said).__name__}")
            name = f"{said.name} (pid {said.pid})"
            refusal = _refusal(said, same_user=connection.same_user)
            if refusal is not None:
                await connection.send(refusal)
                raise ProtocolMismatch(f"{name}: {refusal.reason}")
            return await self._let_in(name, connection)
        return None

    async def _let_in(self, name: str, connection: ControlConnection) -> _Listener:
        writer = self._opened()
        listener = _Listener(name, connection, NO_VERSION, told_pause=self._pause, confirmed=self._pause)
        self._listeners.add(listener)
        weights = Weights(
            PROTOCOL_VERSION,
            self.name,
            writer.generation,
            writer.nbytes,
            self._pause,
            writer.handle,
        )
        try:
            await connection.send(weights, writer.fd)
        except BaseException:
            self._forget(listener)
            raise
        return listener

    async def _stay_with(self, listener: _Listener) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._tell, listener)
                await self._hear(listener)
                tasks.cancel_scope.cancel()
        finally:
            self._forget(listener)

    async def _hear(self, listener: _Listener) -> None:
        """Note what a subscriber confirms and holds, until it leaves."""
        try:
            while True:
                said = await listener.connection.receive()
                if isinstance(said, PauseAck):
                    listener.confirmed = said.number
                elif isinstance(said, ViewsInUse):
                    listener.holding = said.sequence
                self._changed.wake_all()
        except anyio.EndOfStream:
            pass
        except ProtocolMismatch as error:
            log.warning("subscriber_rejected", subscriber=listener.name, reason=str(error))

    async def _tell(self, listener: _Listener) -> None:
        """Tell a subscriber how things stand, whenever they stand otherwise than it was told."""
        try:
            while True:
                news = self._news(listener)
                if news is None:
                    await listener.bell.wait()
                    continue
                await listener.connection.send(news)
                if isinstance(news, EndOfWeights):
                    listener.told_final = True
                    self._changed.wake_all()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # it is gone: `_hear` notices

    def _news(self, listener: _Listener) -> Message | None:
        """What to tell a subscriber next, noted as told; None if it knows how things stand."""
        if listener.told_version != self.version:
            listener.told_version = self.version
            return NewVersion(self.version)
        if listener.told_pause != self._pause:
            listener.told_pause = self._pause
            return Pause(self._pause) if self._pause else Resume()
        if self._final and not listener.told_final:
            return EndOfWeights()
        return None

    def _ring(self) -> None:
        for listener in self._listeners:
            listener.bell.wake_all()

    def _forget(self, listener: _Listener) -> None:
        self._listeners.discard(listener)
        self._changed.wake_all()

    async def _part(self, tasks: TaskGroup) -> None:
        """Tell everyone that this was all, then stop; memory that goes with the publisher is left by all before."""
        self._final = True
        self._ring()
        with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_TIMEOUT_S):
            while any(not listener.told_final for listener in self._listeners):
                await self._changed.wait()
        if self._writer is not None and self._writer.handle is not None:
            with anyio.CancelScope(shield=True):
                await self._left(self._writer.sequence)
        tasks.cancel_scope.cancel()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _refusal(said: Subscribe, *, same_user: bool) -> Reject | None:
    """Why a subscriber may not come in; None if it may."""
    if not same_user:
        return Reject("ProtocolMismatch", "expected a subscriber that runs as the publisher's user")
    if said.version != PROTOCOL_VERSION:
        versions = f"expected protocol version {PROTOCOL_VERSION}, got {said.version}"
        return Reject("ProtocolMismatch", f"{versions}: install the same penstock on both sides")
    return None
