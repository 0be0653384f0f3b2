"""GroupQueue: the groups that wait, in order of arrival, and counted by whose they are and how large.

What is asked of it often (how much waits, of whom, how large the largest is) it knows without looking at its groups.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from .records import Submission

__all__ = ["NOBODY", "GroupQueue", "Lane", "Queued"]

G = TypeVar("G")

NOBODY = -1
"""Whose the groups are that came without the id of an environment."""


@dataclass(frozen=True, slots=True, eq=False)
class Queued(Generic[G]):
    """A group that waits."""

    number: int
    """Its place in the order of arrival."""
    lane: int
    """Whose it is: an `env_id`, or NOBODY."""
    submission: Submission[G]
    """The group."""

    @property
    def size(self) -> int:
        """Its sequences."""
        return self.submission.sequences


@dataclass(slots=True)
class Lane(Generic[G]):
    """The groups of one environment that wait."""

    groups: OrderedDict[int, Queued[G]] = field(default_factory=OrderedDict)
    """By number, in order of arrival. (A dict gets slow at its front when what stood there is removed.)"""
    sizes: Counter[int] = field(default_factory=Counter)
    """How many groups there are of so many sequences."""
    sequences: int = 0
    """All of them."""


class GroupQueue(Generic[G]):
    """Groups that wait."""

    def __init__(self) -> None:
        self.lanes: dict[int, Lane[G]] = {}
        """Those that are not empty."""
        self.sizes: Counter[int] = Counter()
        """How many groups there are of so many sequences."""
        self.sequences = 0
        """All that wait."""
        self._groups: OrderedDict[int, Queued[G]] = OrderedDict()
        self._arrived = 0

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Queued[G]]:
        return iter(self._groups.values())

    @property
    def largest(self) -> int:
        """Sequences of the largest group, at least 1."""
        return max(self.sizes, default=1)

    def append(self, lane: int, submission: Submission[G]) -> None:
        """A group arrived."""
        self._arrived += 1
        self._add(Queued(self._arrived, lane, submission))

    def put_back(self, queued: Queued[G]) -> None:
        """A group that was removed is the first again."""
        self._add(queued)
        self._groups.move_to_end(queued.number, last=False)
        self.lanes[queued.lane].groups.move_to_end(queued.number, last=False)

    def _add(self, queued: Queued[G]) -> None:
        self._groups[queued.number] = queued
        own = self.lanes.setdefault(queued.lane, Lane())
        own.groups[queued.number] = queued
        own.sizes[queued.size] += 1
        own.sequences += queued.size
        self.sizes[queued.size] += 1
        self.sequences += queued.size

    def first(self, lane: int) -> Queued[G]:
        """The oldest group of a lane that is not empty."""
        return next(iter(self.lanes[lane].groups.values()))

    def remove(self, queued: Queued[G]) -> None:
        """A group leaves."""
        del self._groups[queued.number]
        own = self.lanes[queued.lane]
        del own.groups[queued.number]
        own.sequences -= queued.size
        self.sequences -= queued.size
        for sizes in (own.sizes, self.sizes):
            sizes[queued.size] -= 1
            if not sizes[queued.size]:
                del sizes[queued.size]
        if not own.groups:
            del self.lanes[queued.lane]
