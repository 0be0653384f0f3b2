"""Turns: whose group is next, so that everybody has its part of the sequences.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): every lane has a virtual time, which goes on by what it was given
divided by its part, and the one that is furthest behind is next. Parts are of sequences. A lane that had nothing to
give begins at the time of those that had: it has saved nothing up, and owes nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from typing import TypeVar

from .group_queue import GroupQueue, Queued

__all__ = ["LEAST_PART", "Turns", "parts"]

G = TypeVar("G")

LEAST_PART = 0.01
"""Nobody's part is less than this of an equal one, whatever its weight: the least weight that the original tells."""


def parts(weights: Mapping[int, float], minima: Mapping[int, float]) -> dict[int, float]:
    """The part of each: by its weight, at least its minimum, and never nothing. They sum to 1.

    >>> parts({0: 1.0, 1: 1.0, 2: 1.0}, {0: 0.5})
    {0: 0.5, 1: 0.25, 2: 0.25}

    Minima that sum to more than what `LEAST_PART` leaves are scaled down to that.
    """
    least = LEAST_PART / max(1, len(weights))
    promised = sum(minima.values())
    scale = min(1.0, (1 - LEAST_PART) / promised) if promised else 1.0
    wanted = {lane: max(least, minima.get(lane, 0.0) * scale) for lane in weights}
    fixed: dict[int, float] = {}
    while True:
        free = {lane: max(0.0, weight) for lane, weight in weights.items() if lane not in fixed}
        left, together = 1 - sum(fixed.values()), sum(free.values())
        by_weight = {lane: left * (w / together if together else 1 / len(free)) for lane, w in free.items()}
        below = {lane: wanted[lane] for lane, part in by_weight.items() if part < wanted[lane]}
        if not below:
            return {lane: fixed.get(lane) or by_weight[lane] for lane in weights}
        fixed |= below


class Turns:
    """Who is next among the lanes that have groups."""

    def __init__(self) -> None:
        self._parts: Mapping[int, float] = {}
        self._equal = 1.0
        """The part of a lane that has none of its own: of environments that left, or fell silent."""
        self._times: dict[int, float] = {}
        """The virtual time of every lane that ever had a group."""
        self._waiting: dict[int, float] = {}
        """Of those that have groups now."""
        self._latest = 0.0
        """The latest of all virtual times: where everybody begins after nobody had anything."""

    def share(self, parts: Mapping[int, float]) -> None:
        """From now on, these are the parts."""
        self._parts = parts
        self._equal = 1 / max(1, len(parts))

    def waits(self, lane: int) -> None:
        """This lane has a group now, and had none."""
        begun = min(self._waiting.values(), default=self._latest)
        self._waiting[lane] = max(begun, self._times.get(lane, 0.0))

    def next(self) -> int | None:
        """The lane whose turn it is, or None where none has a group."""
        _, lane = min(zip(self._waiting.values(), self._waiting, strict=True), default=(0.0, None))
        return lane

    def gave(self, lane: int, sequences: int, *, more: bool) -> None:
        """This lane gave so many sequences; whether it has `more`."""
        time = self._waiting.pop(lane) + self._cost(lane, sequences)
        self._times[lane] = time
        self._latest = max(self._latest, time)
        if more:
            self._waiting[lane] = time

    def in_turn(self, queue: GroupQueue[G]) -> Iterator[Queued[G]]:
        """All groups, in the order in which they would leave if nothing came and all were taken."""
        lanes = {lane: iter(queue.lanes[lane].groups.values()) for lane in self._waiting}
        due = [(time, lane) for lane, time in self._waiting.items()]
        heapq.heapify(due)
        while due:
            time, lane = due[0]
            queued = next(lanes[lane], None)
            if queued is None:
                heapq.heappop(due)
            else:
                heapq.heapreplace(due, (time + self._cost(lane, queued.size), lane))
                yield queued

    def _cost(self, lane: int, sequences: int) -> float:
        return sequences / self._parts.get(lane, self._equal)
