"""The subscribers of one segment of weights on this host: notified of versions and pauses, and waited for.

Used by the publisher for samplers that share its memory, and by the mirror of a publisher on another host. A subscriber
is at the end of a `Conversation`: a Unix socket, or a connection over tcp to the mirror of another host.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio

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
)
from ..accounting.telemetry import get_logger
from ..channels.connection import Conversation
from ..channels.control_connection import ControlConnection
from ..channels.rejections import RejectionCounter
from ..util.waiting import Waiters
from .weights import NO_VERSION, WeightWriter

log = get_logger("penstock.weights")

HANDSHAKE_TIMEOUT_S = 10.0
"""Seconds that a peer that connects has to send `Subscribe`."""

RELEASE_TIMEOUT_S = 60.0
"""Seconds that `publish` waits for samplers of a buffer: as long as for a pause, for the same reason."""

CLOSE_TIMEOUT_S = 1.0
"""Seconds that a publisher that closes waits until its subscribers are notified."""


@dataclass(slots=True, eq=False)
class Subscription:
    """A connected subscriber: the last state that it was notified of, and the pause that it confirmed."""

    name: str
    connection: Conversation
    notified_version: int = NO_VERSION
    notified_pause: int = 0
    """Number of the pause that it was notified of; 0 once it was notified to resume."""
    confirmed: int = 0
    """Number of the last pause that it confirmed: it has stopped sampling."""
    holding: int = 0
    """The publication whose buffer it samples from; 0 without one."""
    notified_final: bool = False
    changed: Waiters = field(default_factory=Waiters)
    """Wakes the task that notifies it."""


class Subscriptions:
    """The subscribers of one publisher, or mirror."""

    def __init__(self, name: str, release_timeout_s: float) -> None:
        """Prepare for subscribers.

        Args:
            name: of the publisher, for messages.
            release_timeout_s: seconds that `released` waits for a sampler.
        """
        self.name = name
        self.url = ""
        """The URL for subscribers of this host, while it is open."""
        self.rejections: RejectionCounter
        """Counts those that are rejected; set by `open`."""
        self._writer: WeightWriter | None = None
        """The segment that they map."""
        self.release_timeout_s = release_timeout_s
        self.all: set[Subscription] = set()
        """Those that are connected."""
        self.pause = 0
        """Number of the present pause; 0 without one."""
        self._pauses = 0
        """Pauses so far; each has a number of its own, so that a late confirmation is not taken for a new one."""
        self._holders = 0
        """Bodies of `paused` that run or wait."""
        self._last: EndOfWeights | Reject | None = None
        """The message that ends every subscription, once it is known."""
        self._changed = Waiters()
        """Wakes tasks that wait for a subscriber to confirm, or to leave."""

    def open(self, writer: WeightWriter, url: str) -> None:
        """Accept subscribers to the segment of `writer`; they are to connect to `url`."""
        self._writer, self.url = writer, url
        self.rejections = RejectionCounter(url)

    def close(self) -> None:
        """Release the segment, and accept no more subscribers."""
        self._writer = None

    async def joined(self) -> None:
        """Wait for the first subscriber."""
        while not self.all:
            await self._changed.wait()

    async def released(self, sequence: int) -> None:
        """Wait, up to `release_timeout_s`, until no subscriber samples from publication `sequence` or an older one."""
        with anyio.move_on_after(self.release_timeout_s):
            while self._holders_of(sequence):
                await self._changed.wait()
        for subscription in self._holders_of(sequence):
            log.warning(
                "weights_overwritten_in_use",
                url=self.url,
                subscriber=subscription.name,
                release_timeout_s=self.release_timeout_s,
            )
            subscription.holding = 0

    def _holders_of(self, sequence: int) -> list[Subscription]:
        return [subscription for subscription in self.all if 0 < subscription.holding <= sequence]

    @asynccontextmanager
    async def paused(self, pause_timeout_s: float) -> AsyncIterator[None]:
        """Pause sampling within the body; see `WeightPublisher.paused`."""
        self._holders += 1
        if self._holders == 1:
            self._pauses += 1
            self.pause = self._pauses
            self.wake_all()
        try:
            await self._all_stopped(pause_timeout_s)
            yield
        finally:
            self._holders -= 1
            if not self._holders:
                self.pause = 0
                self.wake_all()

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
        return sorted(each.name for each in self.all if each.confirmed != self.pause)

    async def notify_end(self, last: EndOfWeights | Reject = EndOfWeights()) -> None:  # noqa: B008 (it is immutable)
        """Send all subscribers the last message; wait then for those that use memory of a device."""
        self._last = last
        self.wake_all()
        with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_TIMEOUT_S):
            while any(not subscription.notified_final for subscription in self.all):
                await self._changed.wait()
        if self._writer is not None and self._writer.handle is not None:
            with anyio.CancelScope(shield=True):
                await self.released(self._writer.sequence)

    # -- connections ---------------------------------------------------------------------------------------------------

    async def accept(self, connection: ControlConnection) -> None:
        """Serve one subscriber of this host until it disconnects; for `serve_control`."""
        try:
            subscription = await self._handshake(connection)
            if subscription is not None:
                await self.serve(subscription)
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            pass

    async def _handshake(self, connection: ControlConnection) -> Subscription | None:
        """Accept a subscriber and send it the segment; return None if it sends no request in time."""
        with anyio.move_on_after(HANDSHAKE_TIMEOUT_S):
            request = await connection.receive()
            if not isinstance(request, Subscribe):
                raise ProtocolMismatch(f"expected Subscribe, got {type(request).__name__}")
            name = f"{request.name} (pid {request.pid})"
            rejection = refusal(request, same_user=connection.same_user)
            if rejection is not None:
                await connection.send(rejection)
                raise ProtocolMismatch(f"{name}: {rejection.reason}")
            return await self._accepted(name, connection)
        return None

    async def _accepted(self, name: str, connection: ControlConnection) -> Subscription:
        writer = self._writer
        if writer is None:
            raise anyio.BrokenResourceError
        subscription = Subscription(name, connection, notified_pause=self.pause, confirmed=self.pause)
        self.all.add(subscription)
        weights = Weights(PROTOCOL_VERSION, self.name, writer.generation, writer.nbytes, self.pause, writer.handle)
        try:
            await connection.send(weights, writer.fd)
        except BaseException:
            self._remove(subscription)
            raise
        return subscription

    async def serve(self, subscription: Subscription) -> None:
        """Notify `subscription`, and record its reports, until it disconnects."""
        self.all.add(subscription)
        self._changed.wake_all()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._notify, subscription)
                await self._receive(subscription)
                tasks.cancel_scope.cancel()
        finally:
            self._remove(subscription)

    async def _receive(self, subscription: Subscription) -> None:
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

    async def _notify(self, subscription: Subscription) -> None:
        """Send a subscriber every change of the state: the version, the pause, the end."""
        try:
            while True:
                message = self._next_message(subscription)
                if message is None:
                    await subscription.changed.wait()
                    continue
                await subscription.connection.send(message)
                if message is self._last:
                    subscription.notified_final = True
                    self._changed.wake_all()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # it has disconnected: `_receive` ends too

    @property
    def _version(self) -> int:
        return self._writer.latest if self._writer else NO_VERSION

    def _next_message(self, subscription: Subscription) -> Message | None:
        """Return the next message for a subscriber, and record it as sent; None if it has the present state."""
        if subscription.notified_version != (version := self._version):
            subscription.notified_version = version
            return NewVersion(version)
        if subscription.notified_pause != self.pause:
            subscription.notified_pause = self.pause
            return Pause(self.pause) if self.pause else Resume()
        return None if subscription.notified_final else self._last

    def wake_all(self) -> None:
        """Have every subscriber notified of the present state."""
        for subscription in self.all:
            subscription.changed.wake_all()

    def _remove(self, subscription: Subscription) -> None:
        self.all.discard(subscription)
        self._changed.wake_all()


def refusal(request: Subscribe, *, same_user: bool) -> Reject | None:
    """Return the message that rejects a subscriber; None if it is accepted."""
    if not same_user:
        return Reject("ProtocolMismatch", "expected a subscriber that runs as the publisher's user")
    if request.version != PROTOCOL_VERSION:
        versions = f"expected protocol version {PROTOCOL_VERSION}, got {request.version}"
        return Reject("ProtocolMismatch", f"{versions}: install the same penstock on both sides")
    return None
