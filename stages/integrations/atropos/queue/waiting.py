"""Waiting: the groups that wait, whose turn it is among them, and how many there are: views that change together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

from .batches import exactly
from .depth import Depth
from .group_queue import GroupQueue, Queued
from .records import Submission
from .turns import Turns

__all__ = ["Waiting"]

G = TypeVar("G")


class Waiting(Generic[G]):
    """Groups come, and leave one by one or as batches."""

    def __init__(self) -> None:
        self.queue: GroupQueue[G] = GroupQueue()
        """In order of arrival. Read by others, changed here alone."""
        self.turns = Turns()
        """Among lanes."""
        self.depth = Depth()
        """As environments are told it."""
        self._fruitless = False
        """No batch can be formed, and nothing has changed since that was found out."""

    def heed(self, parts: Mapping[int, float], least: Mapping[int, int]) -> None:
        """From now on, these are the parts and the minima of lanes."""
        self.turns.share(parts)
        self.depth.promise(least)
        self.reconsider()

    def reconsider(self) -> None:
        """Something has changed that batches depend on."""
        self._fruitless = False

    def append(self, lane: int, submission: Submission[G]) -> None:
        """A group arrived."""
        self._comes(lane, submission.sequences)
        self.queue.append(lane, submission)

    def put_back(self, groups: list[Queued[G]]) -> None:
        """Groups that left are the first again."""
        for queued in reversed(groups):
            self._comes(queued.lane, queued.size)
            self.queue.put_back(queued)

    def _comes(self, lane: int, size: int) -> None:
        if lane not in self.queue.lanes:
            self.turns.waits(lane)
        self.depth.add(lane, size)
        self._fruitless = False

    def batch(self, batch_size: int, least: Mapping[int, int]) -> list[Queued[G]] | None:
        """Groups that make a batch, and no longer wait; or None."""
        groups = None if self._fruitless else exactly(self.queue, self._order, batch_size, least)
        if groups is None:
            self._fruitless = True
            return None
        for queued in groups:
            self._leaves(queued)
            self.depth.remove(queued.lane, queued.size)
        return groups

    def _order(self) -> Iterable[Queued[G]]:
        """Groups in the order in which they are to leave."""
        return self.turns.in_turn(self.queue)

    def next(self) -> Queued[G] | None:
        """The group whose turn it is, which no longer waits here, but downstream; or None."""
        lane = self.turns.next()
        if lane is None:
            return None
        queued = self.queue.first(lane)
        self._leaves(queued)
        self.depth.taken(queued.lane, queued.size)
        self._fruitless = False
        return queued

    def _leaves(self, queued: Queued[G]) -> None:
        self.queue.remove(queued)
        self.turns.gave(queued.lane, queued.size, more=queued.lane in self.queue.lanes)
