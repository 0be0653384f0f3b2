"""The memory transport: a channel within one event loop. The record itself is passed on, without a copy.

Credit is a place in the queue: `send` takes it and `receive` returns it. Several receivers may share the receiving end;
each record goes to one of them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, Self, TypeVar
from warnings import warn

import anyio
import anyio.lowlevel

from ..._schemas.numbers import whole_number
from ..errors import ChannelFull, PeerClosed, RecordTooLarge
from ..util.waiting import WaitClock, Waiters
from .channel import MEMORY_CAPACITY, ChannelStatistics
from .protocols import AsyncCloseable, AsyncReceiver

T = TypeVar("T")

CHECKPOINT_EVERY = 32
"""Records between two yields to the event loop where no wait is necessary: a yield costs 15 sends."""


@dataclass(slots=True)
class _Queue(Generic[T]):
    """The state that the two ends share. Only one event loop touches it."""

    capacity: int
    capacity_bytes: int | None
    records: deque[tuple[T, int]] = field(default_factory=deque)
    """Each with the bytes that it counts for: 0 where bytes are not bounded."""
    counted: int = 0
    """Bytes that all of them count for."""
    senders: int = 0
    receivers: int = 0
    sent: int = 0
    received: int = 0
    waiting_senders: Waiters = field(default_factory=Waiters)
    waiting_receivers: Waiters = field(default_factory=Waiters)

    def has_room(self, nbytes: int) -> bool:
        if len(self.records) >= self.capacity:
            return False
        return self.capacity_bytes is None or self.counted + nbytes <= self.capacity_bytes

    def statistics(self, clock: WaitClock) -> ChannelStatistics:
        return ChannelStatistics(
            transport="memory",
            capacity=self.capacity,
            items=len(self.records),
            capacity_bytes=self.capacity_bytes,
            nbytes=sum(_nbytes_of(record) for record, _ in self.records),
            sent=self.sent,
            received=self.received,
            senders=self.senders,
            waiting_for=clock.waiting_for,
            waited_s=clock.waited_s,
        )


def _nbytes_of(record: object) -> int:
    return int(getattr(record, "nbytes", 0))


class _End(AsyncCloseable, Generic[T]):
    """The common part of both ends: they close once, report their waits, and warn when they are not closed."""

    __slots__ = ("_clock", "_closed", "_queue", "_until_checkpoint")

    def __init__(self, queue: _Queue[T]) -> None:
        self._queue = queue
        self._clock = WaitClock()
        self._closed = False
        self._until_checkpoint = CHECKPOINT_EVERY

    async def _checkpoint(self) -> None:
        """Let other tasks run now and then, and allow a cancellation before a record moves."""
        self._until_checkpoint = CHECKPOINT_EVERY
        await anyio.lowlevel.checkpoint()

    def clone(self) -> Self:
        """Return another such end of the same channel; each record goes to one of the receiving ends.

        Raises:
            anyio.ClosedResourceError: this end is closed.
        """
        if self._closed:
            raise anyio.ClosedResourceError
        return type(self)(self._queue)

    def statistics(self) -> ChannelStatistics:
        """Return the contents and the waits of this end."""
        return self._queue.statistics(self._clock)

    async def aclose(self) -> None:
        """Close this end. Closing twice is fine."""
        self.close()

    def close(self) -> None:
        """Close this end without awaiting: it has no buffer."""
        if not self._closed:
            self._closed = True
            self._on_close()

    def _on_close(self) -> None:
        raise NotImplementedError

    def __del__(self) -> None:
        if not self._closed:
            warn(f"unclosed {self!r}", ResourceWarning, stacklevel=1, source=self)


class MemorySender(_End[T]):
    """The sending end; see `SendChannel`."""

    __slots__ = ()

    def __init__(self, queue: _Queue[T]) -> None:
        super().__init__(queue)
        queue.senders += 1

    def __repr__(self) -> str:
        return f"<MemorySender {'closed' if self._closed else 'open'}, {len(self._queue.records)} records waiting>"

    def send_nowait(self, record: T, /) -> None:
        """Send `record` if there is room now; see `SendChannel.send_nowait`."""
        queue = self._queue
        if self._closed:
            raise anyio.ClosedResourceError
        if not queue.receivers:
            raise PeerClosed("the receiving end of this memory channel is closed")
        nbytes = 0 if queue.capacity_bytes is None else _nbytes_of(record)  # measuring takes longer than sending
        if not queue.has_room(nbytes):
            if queue.capacity_bytes is not None and nbytes > queue.capacity_bytes:
                raise RecordTooLarge(
                    f"expected a record of at most {queue.capacity_bytes} bytes (capacity_bytes of this memory "
                    f"channel), got one of {nbytes}: raise capacity_bytes or make the group smaller"
                )
            raise ChannelFull(
                f"{len(queue.records)} of {queue.capacity} records wait, "
                f"{queue.counted} of {queue.capacity_bytes or 'any number of'} bytes"
            )
        queue.records.append((record, nbytes))
        queue.counted += nbytes
        queue.sent += 1
        queue.waiting_receivers.wake_one()

    async def send(self, record: T, /) -> None:
        """Send `record`, waiting for room if need be; see `SendChannel.send`."""
        if not self._queue.records:
            # The receiver has had a turn, and gets the next records together.
            self._until_checkpoint = CHECKPOINT_EVERY
        self._until_checkpoint -= 1
        if self._until_checkpoint <= 0:
            await self._checkpoint()
        if not self._queue.waiting_senders:
            try:
                self.send_nowait(record)
            except ChannelFull:
                pass
            else:
                return
        with self._clock.waiting("credit"):
            await self._send_after_waiting(record)
        self._until_checkpoint = CHECKPOINT_EVERY

    async def _send_after_waiting(self, record: T) -> None:
        """Keep the place among the waiting senders until there is room, so that a large record is not starved."""
        await self._queue.waiting_senders.wait()
        while True:
            try:
                self.send_nowait(record)
            except ChannelFull:
                await self._queue.waiting_senders.wait(first=True)
            else:
                break
        if self._queue.has_room(0):  # one large record that left may have made room for several
            self._queue.waiting_senders.wake_one()

    def _on_close(self) -> None:
        self._queue.senders -= 1
        if not self._queue.senders:
            self._queue.waiting_receivers.wake_all()


class MemoryReceiver(_End[T], AsyncReceiver[T]):
    """The receiving end; see `ReceiveChannel`."""

    __slots__ = ()

    def __init__(self, queue: _Queue[T]) -> None:
        super().__init__(queue)
        queue.receivers += 1

    def __repr__(self) -> str:
        return f"<MemoryReceiver {'closed' if self._closed else 'open'}, {len(self._queue.records)} records waiting>"

    def receive_nowait(self) -> T:
        """Return the next record if there is one now; see `ReceiveChannel.receive_nowait`."""
        queue = self._queue
        if self._closed:
            raise anyio.ClosedResourceError
        if not queue.records:
            raise anyio.WouldBlock if queue.senders else anyio.EndOfStream
        record, nbytes = queue.records.popleft()
        queue.counted -= nbytes
        queue.received += 1
        queue.waiting_senders.wake_one()
        return record

    async def receive(self) -> T:
        """Return the next record, waiting for one if need be; see `ReceiveChannel.receive`."""
        self._until_checkpoint -= 1
        if self._until_checkpoint <= 0:
            await self._checkpoint()
        while True:
            try:
                return self.receive_nowait()
            except anyio.WouldBlock:
                with self._clock.waiting("record"):
                    await self._queue.waiting_receivers.wait()

    def _on_close(self) -> None:
        self._queue.receivers -= 1
        if not self._queue.receivers:
            self._queue.waiting_senders.wake_all()


class memory_channel(tuple[MemorySender[T], MemoryReceiver[T]]):  # noqa: N801 (it is called like a function)
    """Both ends of a channel within this event loop: `outbox, inbox = memory_channel[TrajectoryGroup](2)`.

    Data flows left to right. A class only so that the type of record can be given in brackets.

    Args:
        capacity: records that may wait in it, at least 1.
        capacity_bytes: bytes that may wait in it, counted by each record's `nbytes` (0 without one).

    Raises:
        InvalidConfig: a capacity that is no whole number, or below 1.
    """

    __slots__ = ()

    def __new__(cls, capacity: int = MEMORY_CAPACITY, capacity_bytes: int | None = None) -> Self:
        """Return both ends, sender first."""
        capacity = whole_number("capacity", capacity)
        if capacity_bytes is not None:
            capacity_bytes = whole_number("capacity_bytes", capacity_bytes)
        queue: _Queue[T] = _Queue(capacity, capacity_bytes)
        return super().__new__(cls, (MemorySender(queue), MemoryReceiver(queue)))
