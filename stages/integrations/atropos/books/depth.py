"""Depth: how much waits, as environments are told it to control their own flow. No question looks at the groups."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

__all__ = ["Depth"]


MOST_DOWNSTREAM = 4_096
"""No channel holds more groups that environments would have to know of. They may never ask, and it is not to grow."""


class Depth:
    """Sequences that wait in the queue or, taken from it, in a pipeline's channel, by lane."""

    def __init__(self) -> None:
        self.largest = 1
        """Sequences of the largest group."""
        self._sequences: Counter[int] = Counter()
        """By lane; never 0."""
        self._sizes: Counter[int] = Counter()
        """How many groups there are of so many sequences; never 0."""
        self._least: Mapping[int, int] = {}
        """What each lane is to have of a batch at least: so much of what waits is not in anybody's way."""
        self._downstream: deque[tuple[int, int]] = deque()
        """Lane and size of groups that were taken, the oldest first, as far as they are known to be in the channel."""
        self._available: int | None = None
        """The sum of what is available of all lanes, while that is known."""

    def promise(self, least: Mapping[int, int]) -> None:
        """From now on, these are the minima."""
        self._least = least
        self._available = None

    def add(self, lane: int, size: int) -> None:
        """A group waits."""
        self._sizes[size] += 1
        if size > self.largest:
            self.largest = size
            self._available = None
        self._change(lane, size)

    def remove(self, lane: int, size: int) -> None:
        """A group waits no longer."""
        self._sizes[size] -= 1
        if not self._sizes[size]:
            del self._sizes[size]
            if size == self.largest:
                self.largest = max(self._sizes, default=1)
                self._available = None
        self._change(lane, -size)

    def taken(self, lane: int, size: int) -> None:
        """A group that waits was taken, and waits in the pipeline's channel."""
        self._downstream.append((lane, size))
        self.passed(MOST_DOWNSTREAM)

    def passed(self, downstream: int) -> None:
        """Only so many groups still wait in the channel: the last that were taken."""
        while len(self._downstream) > downstream:
            self.remove(*self._downstream.popleft())

    def own(self, lane: int) -> int:
        """Sequences of this lane that wait."""
        return self._sequences[lane]

    def others(self, lane: int) -> int:
        """Sequences of all other lanes, in whole groups of the largest size, beyond their minima.

        None, where every group has one sequence: then nobody's groups wait for others to be packed with.
        """
        if self.largest == 1:
            return 0
        if self._available is None:
            self._available = sum(map(self._available_of, self._sequences))
        return self._available - self._available_of(lane)

    def _available_of(self, lane: int) -> int:
        in_whole_groups = -(-self._sequences[lane] // self.largest) * self.largest
        return max(0, in_whole_groups - self._least.get(lane, 0))

    def _change(self, lane: int, sequences: int) -> None:
        before = self._available_of(lane)
        self._sequences[lane] += sequences
        if self._available is not None:
            self._available += self._available_of(lane) - before
        if not self._sequences[lane]:
            del self._sequences[lane]
