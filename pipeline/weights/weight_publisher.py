"""`WeightPublisher`: publish versions of weights to subscribers; the trainer's side.

The publisher owns a segment of shared memory (`weights`) and a control socket (`weight_connection`). A subscriber that
connects receives the segment's descriptor and stays connected: it is notified of new versions and of pauses, and each
side detects at once when the other one dies. Nothing on the socket is unpickled.

    async with WeightPublisher(model) as publisher:
        await publisher.publish(model.state_dict(), version=0)
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
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
from ..accounting.telemetry import get_logger
from ..channels.control_connection import ControlConnection, serve_control
from ..util.blocking import enter_in_thread
from ..util.file_descriptors import available
from ..util.waiting import Waiters
from .engine_sync import Syncable, synced
from .tensor_layout import WritePlan
from .weight_connection import listening_socket
from .weight_specs import FusedTensor, Tensor, manifest_of
from .weights import NO_VERSION, WeightWriter

if TYPE_CHECKING:
    from torch import nn

log = get_logger("penstock.weights")

DESCRIPTORS = 8
"""File descriptors that opening takes: the segment, the socket and its folder, and temporary ones."""

HANDSHAKE_TIMEOUT_S = 10.0
"""Seconds that a peer that connects has to send `Subscribe`."""

CLOSE_TIMEOUT_S = 1.0
"""Seconds that a publisher that closes waits until its subscribers are notified."""

PAUSE_TIMEOUT_S = 60.0
"""Seconds that subscribers have to stop sampling: longer than a long completion takes."""

RELEASE_TIMEOUT_S = 60.0
"""Seconds that `publish` waits for samplers of a buffer: as long as for a pause, for the same reason."""


E = TypeVar("E", bound=Syncable)


@dataclass(slots=True, eq=False)
class _Subscription:
    """A connected subscriber: the last state that it was notified of, and the pause that it confirmed."""

    name: str
    connection: ControlConnection
    notified_version: int
    notified_pause: int
    """Number of the pause that it was notified of; 0 once it was notified to resume."""
    confirmed: int
    """Number of the last pause that it confirmed: it has stopped sampling."""
    holding: int = 0
    """The publication whose buffer it samples from; 0 for none."""
    notified_final: bool = False
    changed: Waiters = field(default_factory=Waiters)
    """Wakes the task that notifies it."""


class WeightPublisher:
    """Publishes versions of one set of tensors to any number of subscribers on this host.

    A subscriber that copies never delays `publish`. One whose model is views has `release_timeout_s` to end its present
    batch and to load the newer version; a dead one is not waited for, and samples of one that takes longer are invalid.
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
        """Prepare to publish tensors like those of `model`; none are published yet.

        Args:
            model: the module whose `state_dict` will be published. Its non-persistent buffers are not published, but
                samplers whose own differ from their present values are refused. Or a `state_dict`, with the names,
                dtypes and shapes that will be published: then those buffers are not compared. Tied tensors are
                published under each of their names, and stored once.
            fused: tensors that the samplers' models have in one piece.
            cast: dtypes that are published as another one: `{"float32": "bfloat16"}`. No other dtype is ever cast.
            device: the device of the versions: "cpu", or "cuda:0" for samplers on that device.
            release_timeout_s: seconds that `publish` waits for a sampler to leave the buffer that is written next.
            name: of this publisher, for messages.

        Raises:
            InvalidConfig: seconds that are not finite.
            TypeError: a value is no tensor, or has a dtype that cannot be published; or a buffer is on the meta device.
            WeightsMismatch: `fused` does not fit the tensors.
            ValueError: `cast` names a dtype that cannot be published.
        """
        self._plan = WritePlan(manifest_of(model), fused, cast)
        self._device = device
        self._release_timeout_s = finite_number("release_timeout_s", release_timeout_s, zero=True)
        self.name: str = check_name(name or f"publisher in process {os.getpid()}")
        self._url = ""
        self._writer: WeightWriter | None = None
        self._subscriptions: set[_Subscription] = set()
        self._publishing = anyio.Lock()
        self._pause = 0
        """Number of the present pause; 0 where there is none."""
        self._pauses = 0
        """Pauses so far; each has a number of its own, so that a late confirmation is not taken for a new one."""
        self._holders = 0
        """Bodies of `paused` that run or wait."""
        self._final = False
        self._changed = Waiters()
        """Wakes tasks that wait for a subscriber to confirm, or to leave."""
        self._stack = AsyncExitStack()

    def __repr__(self) -> str:
        state = "paused" if self._pause else "open" if self._writer else "closed"
        return f"<WeightPublisher {self._url} {state}: version {self.version}, {len(self._subscriptions)} subscribers>"

    async def __aenter__(self) -> Self:
        """Allocate the segment and open the control socket.

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
            tasks.start_soon(serve_control, listener, self._serve, self._refused)
            stack.push_async_callback(self._notify_end, tasks)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Notify every subscriber that no newer version follows, and close. They keep their weights."""
        await self._stack.aclose()

    @property
    def url(self) -> str:
        """The URL for subscribers, while it is open."""
        return self._url

    @property
    def ties(self) -> Mapping[str, str]:
        """Names of tied tensors, each with that of the earlier tensor with the same memory."""
        return self._plan.ties

    @property
    def version(self) -> int:
        """The newest version that was published; −1 before the first."""
        return self._writer.latest if self._writer else NO_VERSION

    @property
    def subscribers(self) -> list[str]:
        """Names of the connected subscribers."""
        return sorted(subscription.name for subscription in self._subscriptions)

    async def publish(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Make `tensors` the newest weights. Copies in a worker thread; if cancelled, it has published all or none.

        Waits, up to `release_timeout_s`, until models that are views of the version before the last have loaded the
        last.

        Args:
            tensors: the same names, dtypes and shapes as at construction; they must not change until this returns.
            version: the optimizer step that computed them; above every earlier version.

        Raises:
            WeightsMismatch: the tensors differ from those at construction; lists all differences.
            ValueError: `version` is not newer than the last.
            anyio.ClosedResourceError: the publisher is not open.
        """
        async with self._publishing:
            writer = self._opened()
            check = partial(self._plan.check, newest=writer.latest)
            await anyio.to_thread.run_sync(check, tensors, version)
            await self._released(writer.sequence - 1)
            try:
                await anyio.to_thread.run_sync(writer.write, tensors, version)
            finally:
                self._wake_all()

    async def _released(self, sequence: int) -> None:
        """Wait, up to `release_timeout_s`, until no subscriber samples from publication `sequence` or an older one."""
        with anyio.move_on_after(self._release_timeout_s):
            while self._holders_of(sequence):
                await self._changed.wait()
        for subscription in self._holders_of(sequence):
            log.warning(
                "weights_overwritten_in_use",
                url=self._url,
                subscriber=subscription.name,
                release_timeout_s=self._release_timeout_s,
            )
            subscription.holding = 0

    def _holders_of(self, sequence: int) -> list[_Subscription]:
        return [subscription for subscription in self._subscriptions if 0 < subscription.holding <= sequence]

    @asynccontextmanager
    async def paused(self, pause_timeout_s: float = PAUSE_TIMEOUT_S) -> AsyncIterator[None]:
        """Pause sampling within the body: every subscriber has stopped and confirmed that. Sampling resumes afterwards.

        A subscriber that dies is not waited for; one that subscribes meanwhile begins paused.

        Raises:
            TimeoutError: a subscriber did not stop within `pause_timeout_s`; the message names it. Sampling resumes.
        """
        self._holders += 1
        if self._holders == 1:
            self._pauses += 1
            self._pause = self._pauses
            self._wake_all()
        try:
            await self._all_stopped(finite_number("pause_timeout_s", pause_timeout_s, zero=True))
            yield
        finally:
            self._holders -= 1
            if not self._holders:
                self._pause = 0
                self._wake_all()

    def sync(self, engine: E) -> AbstractAsyncContextManager[E]:
        """Wake `engine` and load the newest version for the body; let it sleep afterwards, in any case.

        See `engine_sync.synced` for exceptions.
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
        """Return the names of subscribers that have not confirmed the present pause."""
        return sorted(each.name for each in self._subscriptions if each.confirmed != self._pause)

    def _opened(self) -> WeightWriter:
        if self._writer is None:
            raise anyio.ClosedResourceError
        return self._writer

    # -- connections ---------------------------------------------------------------------------------------------------

    async def _serve(self, connection: ControlConnection) -> None:
        """Serve one subscriber until it disconnects."""
        try:
            subscription = await self._handshake(connection)
            if subscription is not None:
                await self._serve_subscription(subscription)
        except ProtocolMismatch as error:
            self._refused(str(error))
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            pass

    def _refused(self, reason: str) -> None:
        log.warning("subscriber_rejected", url=self._url, reason=reason)

    async def _handshake(self, connection: ControlConnection) -> _Subscription | None:
        """Accept a subscriber and send it the segment; return None if it sends no request in time."""
        with anyio.move_on_after(HANDSHAKE_TIMEOUT_S):
            request = await connection.receive()
            if not isinstance(request, Subscribe):
                raise ProtocolMismatch(f"expected Subscribe, got {type(request).__name__}")
            name = f"{request.name} (pid {request.pid})"
            refusal = _refusal(request, same_user=connection.same_user)
            if refusal is not None:
                await connection.send(refusal)
                raise ProtocolMismatch(f"{name}: {refusal.reason}")
            return await self._accept(name, connection)
        return None

    async def _accept(self, name: str, connection: ControlConnection) -> _Subscription:
        writer = self._opened()
        subscription = _Subscription(name, connection, NO_VERSION, notified_pause=self._pause, confirmed=self._pause)
        self._subscriptions.add(subscription)
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
            self._remove(subscription)
            raise
        return subscription

    async def _serve_subscription(self, subscription: _Subscription) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._notify, subscription)
                await self._receive(subscription)
                tasks.cancel_scope.cancel()
        finally:
            self._remove(subscription)

    async def _receive(self, subscription: _Subscription) -> None:
        """Record the confirmations of a subscriber and the buffer that it holds, until it disconnects."""
        try:
            while True:
                message = await subscription.connection.receive()
                if isinstance(message, PauseAck):
                    subscription.confirmed = message.number
                elif isinstance(message, ViewsInUse):
                    subscription.holding = message.sequence
                self._changed.wake_all()
        except anyio.EndOfStream:
            pass
        except ProtocolMismatch as error:
            log.warning("subscriber_rejected", subscriber=subscription.name, reason=str(error))

    async def _notify(self, subscription: _Subscription) -> None:
        """Send a subscriber every change of the state: the version, the pause, the end."""
        try:
            while True:
                message = self._next_message(subscription)
                if message is None:
                    await subscription.changed.wait()
                    continue
                await subscription.connection.send(message)
                if isinstance(message, EndOfWeights):
                    subscription.notified_final = True
                    self._changed.wake_all()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # it has disconnected: `_receive` ends too

    def _next_message(self, subscription: _Subscription) -> Message | None:
        """Return the next message for a subscriber, and record it as sent; None if it has the present state."""
        if subscription.notified_version != self.version:
            subscription.notified_version = self.version
            return NewVersion(self.version)
        if subscription.notified_pause != self._pause:
            subscription.notified_pause = self._pause
            return Pause(self._pause) if self._pause else Resume()
        if self._final and not subscription.notified_final:
            return EndOfWeights()
        return None

    def _wake_all(self) -> None:
        for subscription in self._subscriptions:
            subscription.changed.wake_all()

    def _remove(self, subscription: _Subscription) -> None:
        self._subscriptions.discard(subscription)
        self._changed.wake_all()

    async def _notify_end(self, tasks: TaskGroup) -> None:
        """Notify all subscribers of the end, then stop; wait first for those that use memory of a device."""
        self._final = True
        self._wake_all()
        with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_TIMEOUT_S):
            while any(not subscription.notified_final for subscription in self._subscriptions):
                await self._changed.wait()
        if self._writer is not None and self._writer.handle is not None:
            with anyio.CancelScope(shield=True):
                await self._released(self._writer.sequence)
        tasks.cancel_scope.cancel()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _refusal(request: Subscribe, *, same_user: bool) -> Reject | None:
    """Return the message that rejects a subscriber; None if it is accepted."""
    if not same_user:
        return Reject("ProtocolMismatch", "expected a subscriber that runs as the publisher's user")
    if request.version != PROTOCOL_VERSION:
        versions = f"expected protocol version {PROTOCOL_VERSION}, got {request.version}"
        return Reject("ProtocolMismatch", f"{versions}: install the same penstock on both sides")
    return None
