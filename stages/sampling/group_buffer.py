"""Build groups from pieces: hold the pieces of each prompt, and decide when a group leaves, whole or not.

    piece ─▶ waits in the buffer ─▶ leaves: whole · overdue · evicted · left over
        └──▶ is refused: duplicate · late · beyond

Every trajectory that is added ends in exactly one of these, once. A group that has left is closed: a piece of it that
arrives afterwards is late, and never begins a second group of that name. The `max_closed` groups that closed last are
remembered. A piece of an older one is taken for the first of a new group, and that is hardly ever whole when it leaves.
So `max_closed` bounds how late a piece may be and still be recognised: by the groups that closed since its own did.

Sans-I/O. Time is an argument, in seconds of a clock that does not go back. The caller decides what to do with a group
that leaves before it is whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from ..._pipeline.accounting.repetition_sets import exclude, mask_of
from ..._schemas import GroupId, TrajectoryGroup

Why: TypeAlias = Literal["whole", "overdue", "evicted", "left over", "duplicate", "late", "beyond"]
"""The reason that trajectories leave the buffer, or are refused.

whole: every repetition has arrived · overdue: its deadline has passed · evicted: others needed its room · left over:
the stream ended · duplicate: its group waits, and holds it already · late: its group has left · beyond: the group has
no such repetition.
"""


class Flush(NamedTuple):
    """Trajectories of one group that leave the buffer together, or are refused."""

    group: GroupId
    mask: int
    """The repetitions."""
    why: Why
    pieces: Sequence[TrajectoryGroup] = ()
    """The pieces of a group that leaves, in order of arrival; empty for refused trajectories."""


@dataclass(slots=True)
class _PendingGroup:
    """A group that waits."""

    due_s: float
    mask: int = 0
    nbytes: int = 0
    pieces: list[TrajectoryGroup] = field(default_factory=list)


class GroupBuffer:
    """Holds groups of `group_size` repetitions, from 0, each due `deadline_s` seconds after its first piece.

    >>> from penstock.testing import group
    >>> buffer = GroupBuffer(2, deadline_s=None, max_groups=8, max_bytes=2**20, max_closed=128)
    >>> pieces = [group(completion_lengths=[3], rollout_ids=[repetition]) for repetition in (0, 1, 0)]
    >>> [[flush.why for flush in buffer.take(piece, now_s=0)] for piece in pieces]
    [[], ['whole'], ['late']]
    """

    def __init__(
        self, group_size: int, *, deadline_s: float | None, max_groups: int, max_bytes: int, max_closed: int
    ) -> None:
        self._whole = (1 << group_size) - 1
        self._deadline_s = math.inf if deadline_s is None else deadline_s
        self._max_groups = max_groups
        self._max_bytes = max_bytes
        self._max_closed = max_closed
        self._waiting: dict[GroupId, _PendingGroup] = {}
        """Groups that wait, in the order of their first pieces, and so of their deadlines."""
        self._nbytes = 0
        self._closed: dict[GroupId, None] = {}
        """Closed groups that are remembered, in the order of closing."""

    def __repr__(self) -> str:
        return f"<GroupBuffer: {self.groups} groups waiting, {self.nbytes} bytes, {self.closed} closed>"

    @property
    def groups(self) -> int:
        """Groups that wait."""
        return len(self._waiting)

    @property
    def nbytes(self) -> int:
        """Bytes that their columns take."""
        return self._nbytes

    @property
    def closed(self) -> int:
        """Groups that are remembered to have left."""
        return len(self._closed)

    @property
    def due_s(self) -> float:
        """The time when `expire` next returns a group; infinity if no group has a deadline."""
        return next(iter(self._waiting.values())).due_s if self._waiting else math.inf

    def take(self, piece: TrajectoryGroup, now_s: float) -> list[Flush]:
        """Add `piece`, and return the trajectories that leave or are refused because of it.

        Groups that are due by now leave first. Trajectories that wait are copied, so that they occupy no slot.
        """
        flushes, group, arrived = self.expire(now_s), piece.id, mask_of(piece.rollout_ids.tolist())
        wanted = arrived & self._whole
        pending = self._waiting.get(group)
        duplicate = wanted & pending.mask if pending else 0
        late = wanted if group in self._closed else 0
        refused: list[tuple[int, Why]] = [(arrived & ~wanted, "beyond"), (duplicate, "duplicate"), (late, "late")]
        flushes += [Flush(group, mask, why) for mask, why in refused if mask]
        fresh = exclude(piece, arrived & ~wanted | duplicate | late)
        if fresh is not None and len(fresh):
            pending = pending or _PendingGroup(now_s + self._deadline_s)
            flushes += self._add(group, wanted & ~duplicate, fresh, pending)
        return flushes

    def expire(self, now_s: float) -> list[Flush]:
        """Close the groups that are due by now, and return them."""
        overdue: list[Flush] = []
        while self.due_s <= now_s:
            overdue.append(self._close_oldest("overdue"))
        return overdue

    def finish(self) -> list[Flush]:
        """Close all groups that wait, and return them: the stream has ended."""
        return [self._close_oldest("left over") for _ in range(self.groups)]

    def _add(self, group: GroupId, mask: int, piece: TrajectoryGroup, pending: _PendingGroup) -> list[Flush]:
        """Add `piece` to `pending`; no repetition is in both."""
        pending.mask |= mask
        if pending.mask == self._whole:
            pending.pieces.append(piece)
            return [self._close(group, pending, "whole")]
        nbytes = piece.nbytes
        pending.pieces.append(piece.owned())
        pending.nbytes += nbytes
        self._nbytes += nbytes
        self._waiting[group] = pending
        return self._make_room(group, pending)

    def _make_room(self, group: GroupId, grown: _PendingGroup) -> list[Flush]:
        """Evict the oldest groups until all fit; `grown` itself where it alone exceeds the bound on bytes."""
        if grown.nbytes > self._max_bytes:
            return [self._close(group, grown, "evicted")]
        evicted: list[Flush] = []
        while self.groups > self._max_groups or self._nbytes > self._max_bytes:
            evicted.append(self._close_oldest("evicted"))
        return evicted

    def _close_oldest(self, why: Why) -> Flush:
        return self._close(*next(iter(self._waiting.items())), why)

    def _close(self, group: GroupId, pending: _PendingGroup, why: Why) -> Flush:
        if self._waiting.pop(group, None) is not None:
            self._nbytes -= pending.nbytes
        self._closed[group] = None
        if self.closed > self._max_closed:
            del self._closed[next(iter(self._closed))]
        return Flush(group, pending.mask, why, pending.pieces)
