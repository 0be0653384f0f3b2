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
        """Sequences of the largest group of those that count for others."""
        self._sizes: dict[int, Counter[int]] = {}
        """Groups of so many sequences, by lane; never 0."""
        self._sequences: Counter[int] = Counter()
        """By lane, of sizes that count for others; never 0."""
        self._unpackable: frozenset[int] = frozenset()
        """Sizes that count for nobody but whose they are: they would be in others' way for ever."""
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

    def leave_out(self, unpackable: frozenset[int]) -> None:
        """From now on, groups of these sizes do not count for others."""
        if unpackable == self._unpackable:
            return
        self._unpackable = unpackable
        self._sequences.clear()
        for size in self._sizes.keys() - unpackable:
            for lane, groups in self._sizes[size].items():
                self._sequences[lane] += size * groups
        self._resize()
        self._available = None

    def add(self, lane: int, size: int) -> None:
        """A group waits."""
        self._sizes.setdefault(size, Counter())[lane] += 1
        if size not in self._unpackable:
            self._resize()
            self._change(lane, size)

    def remove(self, lane: int, size: int) -> None:
        """A group waits no longer."""
        lanes = self._sizes[size]
        lanes[lane] -= 1
        if not lanes[lane]:
            del lanes[lane]
        if not lanes:
            del self._sizes[size]
        if size not in self._unpackable:
            self._resize()
            self._change(lane, -size)

    def _resize(self) -> None:
        largest = max(self._sizes.keys() - self._unpackable, default=1)
        if largest != self.largest:
            self.largest = largest
            self._available = None

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
        return sum(size * lanes[lane] for size, lanes in self._sizes.items())

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
