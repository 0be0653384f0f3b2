"""The edge between two stages of a running pipeline: a channel, and a count of the trajectories that pass.

A stage gets a `CountingSendChannel`, the sending end of its channel with two additions: it counts trajectories, and
behind a source it admits them to the ledger, so that a user's source need not know the ledger. A copy of a trajectory
that a source sends again is dropped here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import anyio
import anyio.lowlevel

from ..._schemas import TrainBatch, TrajectoryGroup
from ..accounting.ledger import Ledger
from ..accounting.repetition_sets import exclude
from ..channels.channel import ChannelStatistics, ReceiveChannel, SendChannel
from ..channels.memory import CHECKPOINT_EVERY
from ..channels.protocols import AsyncCloseable, AsyncReceiver
from .statistics import EdgeStatistics

T = TypeVar("T")

RECORDS = (TrajectoryGroup, TrainBatch)
"""Records whose trajectories are counted."""


@dataclass(slots=True, eq=False)
class EdgeCounter:
    """Counts the trajectories that pass from one stage to the next, and admits those of a source to the ledger."""

    admits_to: Ledger | None = None
    """The ledger, behind a source."""
    on_sent: Callable[[], None] | None = None
    """Called after every record, in a worker: sends a report when one is due."""
    leaves: Ledger | None = None
    """The ledger, at the end of a fragment: the edge around the fragment hands its records over once more."""
    trajectories: int = 0
    """Trajectories that have passed."""

    def admit(self, record: T) -> T | None:
        """Return the part of `record` that may be sent; None where all of its trajectories are copies.

        Raises:
            InvalidRecord: a column is no array, or has another dtype; raised here, in the stage that sends it.
        """
        if not isinstance(record, RECORDS):
            return record
        record.schema.check_types(record)
        if self.admits_to is None and self.leaves is None:
            return record
        admitted: TrajectoryGroup | TrainBatch | None = record
        if self.admits_to is not None and (copies := self.admits_to.hand_over(record)):
            admitted = exclude(cast("TrajectoryGroup", record), copies)  # in a batch they are an error
        if self.leaves is not None and admitted is not None:
            self.leaves.take_back(admitted)
        return cast("T | None", admitted)

    def take_back(self, record: object) -> None:
        """Undo the admission of `record`: it could not be sent."""
        if self.admits_to is not None and isinstance(record, RECORDS):
            self.admits_to.take_back(record)

    def count(self, record: object) -> None:
        """Count `record` as passed."""
        if isinstance(record, RECORDS):
            self.trajectories += record.rollouts
        if self.on_sent is not None:
            self.on_sent()


@dataclass(slots=True, eq=False)
class _OpenEnds:
    """State that an outbox and its clones share."""

    open: list[CountingSendChannel[Any]] = field(default_factory=list)
    waited_s: float = 0.0
    """Seconds that the ends waited that are closed by now."""


class CountingSendChannel(AsyncCloseable, Generic[T]):
    """The sending end that a stage gets; see `SendChannel`."""

    __slots__ = ("_counter", "_end", "_ends")

    def __init__(self, end: SendChannel[T], counter: EdgeCounter, ends: _OpenEnds | None = None) -> None:
        self._end = end
        self._counter = counter
        self._ends = ends or _OpenEnds()
        self._ends.open.append(self)

    def __repr__(self) -> str:
        return f"<CountingSendChannel of {self._end!r}>"

    async def send(self, record: T, /) -> None:
        """Send `record`; see `SendChannel.send`."""
        admitted = self._counter.admit(record)
        if admitted is None:
            await anyio.lowlevel.checkpoint()  # a stage that sends only copies must let other tasks run too
            return
        try:
            await self._end.send(admitted)
        except BaseException:
            self._counter.take_back(admitted)
            raise
        self._counter.count(admitted)

    def send_nowait(self, record: T, /) -> None:
        """Send `record` if there is credit for it now; see `SendChannel.send_nowait`."""
        admitted = self._counter.admit(record)
        if admitted is None:
            return
        try:
            self._end.send_nowait(admitted)
        except BaseException:
            self._counter.take_back(admitted)
            raise
        self._counter.count(admitted)

    def clone(self) -> CountingSendChannel[T]:
        """Return another sending end of the same channel; see `SendChannel.clone`."""
        return CountingSendChannel(self._end.clone(), self._counter, self._ends)

    async def aclose(self) -> None:
        """Close this end. Closing twice is fine."""
        if self in self._ends.open:
            self._ends.open.remove(self)
            self._ends.waited_s += self._end.statistics().waited_s
            await self._end.aclose()

    async def close_all(self) -> None:
        """Close this end and its clones, after the stage has returned."""
        with anyio.CancelScope(shield=True):
            while self._ends.open:
                await self._ends.open[-1].aclose()

    def statistics(self) -> ChannelStatistics:
        """Return the state of this end; see `SendChannel.statistics`."""
        return self._end.statistics()

    @property
    def all_closed(self) -> bool:
        """Return whether this end and all its clones are closed."""
        return not self._ends.open

    @property
    def waits(self) -> tuple[bool, float]:
        """Return whether this end or a clone waits for credit, and the seconds that they have waited in all."""
        taken = [end.statistics() for end in self._ends.open]
        return any(each.waiting_for for each in taken), self._ends.waited_s + sum(each.waited_s for each in taken)


class StoppableReceiveChannel(AsyncReceiver[T]):
    """The receiving end that a sink gets, whose stream the run can end; see `ReceiveChannel`."""

    __slots__ = ("_end", "_ended", "_until_checkpoint", "_waiting")

    def __init__(self, end: ReceiveChannel[T]) -> None:
        self._end = end
        self._ended = False
        self._until_checkpoint = CHECKPOINT_EVERY
        self._waiting: set[anyio.CancelScope] = set()

    def __repr__(self) -> str:
        return f"<StoppableReceiveChannel of {self._end!r}>"

    def end(self) -> None:
        """End the stream here, also where more was sent."""
        self._ended = True
        for scope in self._waiting:
            scope.cancel()

    async def receive(self) -> T:
        """Return the next record, waiting for one if need be; see `ReceiveChannel.receive`."""
        self._until_checkpoint -= 1
        if self._until_checkpoint <= 0:
            self._until_checkpoint = CHECKPOINT_EVERY
            await anyio.lowlevel.checkpoint()
        try:
            return self.receive_nowait()  # a cancel scope for each record would cost more than to receive it
        except anyio.WouldBlock:
            pass
        self._until_checkpoint = CHECKPOINT_EVERY
        with anyio.CancelScope() as scope:
            self._waiting.add(scope)
            try:
                return await self._end.receive()
            finally:
                self._waiting.discard(scope)
        raise anyio.EndOfStream

    def receive_nowait(self) -> T:
        """Return the next record if there is one now; see `ReceiveChannel.receive_nowait`."""
        if self._ended:
            raise anyio.EndOfStream
        return self._end.receive_nowait()

    async def aclose(self) -> None:
        """Close this end. Closing twice is fine."""
        await self._end.aclose()

    def statistics(self) -> ChannelStatistics:
        """Return the state of this end; see `ReceiveChannel.statistics`."""
        return self._end.statistics()


@dataclass(slots=True, eq=False)
class Edge:
    """One edge of a running pipeline."""

    upstream: str
    downstream: str
    inbox: ReceiveChannel[Any]
    counter: EdgeCounter
    outbox: CountingSendChannel[Any] | None
    """None where the sending ends are in other processes."""

    def statistics(self) -> EdgeStatistics:
        """Return the state of this edge now."""
        return EdgeStatistics(
            upstream=self.upstream,
            downstream=self.downstream,
            trajectories=self.counter.trajectories,
            channel=self.inbox.statistics(),
        )

    @property
    def starved(self) -> bool:
        """Return whether the stage downstream waits for records."""
        return self.inbox.statistics().waiting_for == "record"

    @property
    def congested(self) -> bool:
        """Return whether the stage upstream waits for credit; in processes, whether all of them have used theirs."""
        if self.outbox is not None:
            return self.outbox.waits[0]
        channel = self.inbox.statistics()
        return channel.senders > 0 and channel.fill >= 1
