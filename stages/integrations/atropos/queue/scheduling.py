"""Fair shares among environments: the order of groups, and the part of the queue's room that each may hold.

Knows neither batches nor registrations. Invariant: `in_turn` returns every group that `PendingGroups` holds.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from .records import QueueFull, Submission, SubmissionTooLarge

G = TypeVar("G")

ANONYMOUS = -1
"""The lane of groups without a registered environment."""

MIN_SHARE = 0.01
"""No environment's share is less than this part of an equal one; and the share of all lanes without an environment."""


@dataclass(frozen=True, slots=True, eq=False)
class QueuedGroup(Generic[G]):
    """A group that waits."""

    number: int
    """Its place in the order of arrival."""
    lane: int
    """The env_id of its sender, or ANONYMOUS."""
    submission: Submission[G]

    @property
    def sequences(self) -> int:
        """Return the number of its sequences."""
        return self.submission.sequences


@dataclass(slots=True)
class EnvQueue(Generic[G]):
    """The groups of one lane that wait."""

    groups: OrderedDict[int, QueuedGroup[G]] = field(default_factory=OrderedDict)
    """By number, in order of arrival. (A plain dict gets slow at its front when entries there are removed.)"""
    sizes: Counter[int] = field(default_factory=Counter)
    """Groups by number of sequences; never 0."""


class PendingGroups(Generic[G]):
    """All groups that wait, by lane."""

    def __init__(self) -> None:
        self.lanes: dict[int, EnvQueue[G]] = {}
        """Those that are not empty."""
        self.sequences = 0
        self._arrived = 0

    def __len__(self) -> int:
        return sum(len(lane.groups) for lane in self.lanes.values())

    def sizes(self) -> set[int]:
        """Return all group sizes that wait."""
        return {size for lane in self.lanes.values() for size in lane.sizes}

    def append(self, lane: int, submission: Submission[G]) -> None:
        """Add a group that arrived."""
        self._arrived += 1
        self._add(QueuedGroup(self._arrived, lane, submission))

    def put_back(self, groups: Sequence[QueuedGroup[G]]) -> None:
        """Add groups that were removed, each at its place in the order of arrival."""
        for queued in groups:
            self._add(queued)
        for lane in {queued.lane for queued in groups}:
            self.lanes[lane].groups = OrderedDict(sorted(self.lanes[lane].groups.items()))

    def _add(self, queued: QueuedGroup[G]) -> None:
        lane = self.lanes.setdefault(queued.lane, EnvQueue())
        lane.groups[queued.number] = queued
        lane.sizes[queued.sequences] += 1
        self.sequences += queued.sequences

    def remove(self, queued: QueuedGroup[G]) -> None:
        """Remove a group."""
        lane = self.lanes[queued.lane]
        del lane.groups[queued.number]
        lane.sizes[queued.sequences] -= 1
        self.sequences -= queued.sequences
        if not lane.sizes[queued.sequences]:
            del lane.sizes[queued.sequences]
        if not lane.groups:
            del self.lanes[queued.lane]


class FairScheduler:
    """Start-time fair queueing (Goyal, Vin and Cheng, 1996) over lanes, in sequences.

    Each flow has a virtual time. It advances by the sequences sent divided by the flow's share; the flow that is
    furthest behind is next. A flow that was empty starts at the time of the others: it accumulates no share.

    A lane without a share (anonymous, disconnected, timed out) takes no part in this. All of those are one flow, oldest
    group first. It has MIN_SHARE beside the shares of the environments, so that its groups are delivered even while the
    environments always have some waiting; otherwise it has the rest.
    """

    def __init__(self) -> None:
        self._shares: Mapping[int, float] = {}
        self._clock = 0.0
        """The virtual time of the next flow at the last call of `in_turn`."""
        self._finished: dict[int, float] = {}
        """The virtual time of each flow after the last group that it sent."""

    def set_shares(self, shares: Mapping[int, float]) -> None:
        """Set the shares of the lanes that have one."""
        self._shares = shares
        self._finished = {flow: time for flow, time in self._finished.items() if flow in shares or flow == ANONYMOUS}

    def in_turn(self, lanes: Mapping[int, EnvQueue[G]]) -> Iterator[QueuedGroup[G]]:
        """Return all groups in the order of leaving if all were taken and no others came."""
        flows = {lane: iter(own.groups.values()) for lane, own in lanes.items() if lane in self._shares}
        if others := [own.groups.values() for lane, own in lanes.items() if lane not in self._shares]:
            flows[ANONYMOUS] = heapq.merge(*others, key=lambda queued: queued.number)
        due = [(self._start(flow), flow) for flow in flows]
        heapq.heapify(due)
        if due:
            self._clock = due[0][0]
        return self._merged(flows, due)

    def _merged(
        self, flows: Mapping[int, Iterator[QueuedGroup[G]]], due: list[tuple[float, int]]
    ) -> Iterator[QueuedGroup[G]]:
        while due:
            time, flow = due[0]
            queued = next(flows[flow], None)
            if queued is None:
                heapq.heappop(due)
            else:
                heapq.heapreplace(due, (time + self._cost(flow, queued.sequences), flow))
                yield queued

    def charge(self, lane: int, sequences: int) -> None:
        """Count sequences that a lane sent."""
        flow = lane if lane in self._shares else ANONYMOUS
        self._finished[flow] = self._start(flow) + self._cost(flow, sequences)

    def _start(self, flow: int) -> float:
        return max(self._clock, self._finished.get(flow, 0.0))

    def _cost(self, flow: int, sequences: int) -> float:
        return sequences / self._shares.get(flow, MIN_SHARE)


class AdmissionControl:
    """A bound on the groups, or on the bytes, that are held: in total and by lane.

    Where several environments share the room, each may hold at most as much as is free (Choudhury and Hahne, 1998:
    dynamic thresholds of shared buffers, with a factor of 1). So a slow one finds room even while others submit fast.
    """

    def __init__(self, unit: str, capacity: int | None) -> None:
        self.held = 0
        self._unit = unit
        self._capacity = math.inf if capacity is None else capacity
        self._by_lane: Counter[int] = Counter()

    def check(self, lane: int, wanted: int, *, shared: bool) -> None:
        """Check that there is room for `wanted` more, some of it of this lane.

        Raises:
            SubmissionTooLarge: it exceeds the bound itself.
            QueueFull: the room is taken now.
        """
        if wanted > self._capacity:
            raise SubmissionTooLarge(
                f"expected at most {self._capacity} {self._unit} at once, got {wanted}: submit fewer"
            )
        free, own = self._capacity - self.held, self._by_lane[lane]
        if wanted > free or (shared and own + wanted > free):
            raise QueueFull(
                f"expected room for {wanted} {self._unit}, got {free} of {self._capacity} free, with {own} of this "
                f"environment held: submit again in {QueueFull.retry_after_s:.0f} s"
            )

    def hold(self, lane: int, amount: int) -> None:
        """Add `amount` to the count of `lane`; it may be negative."""
        self.held += amount
        self._by_lane[lane] += amount
