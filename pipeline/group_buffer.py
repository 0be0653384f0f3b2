"""Groups from pieces: what has come of which prompt, and which groups are to leave, whole or not.

    piece ─▶ waits in the stash ─▶ leaves: whole · overdue · evicted · left over
        └──▶ is refused: duplicate · late · beyond

Every trajectory that is taken ends in exactly one of these, once. A group that has left is closed: what comes of it
afterwards is late, and never the beginning of a second group of that name. The `max_closed` that closed last are
remembered. What comes of one that was forgotten is taken for the first piece of a new group, and leaves with that,
hardly ever whole. So the bound says how far behind a straggler may be and still be known for one: by how many groups
that closed since its own did.

Sans-I/O. Time is an argument, in seconds of a clock that does not go back. What becomes of a group that leaves before
it is whole is for the caller to say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from ..schemas import GroupId, TrajectoryGroup
from .repetition_sets import exclude, mask_of

__all__ = ["Flush", "GroupBuffer", "Why"]

Why: TypeAlias = Literal["whole", "overdue", "evicted", "left over", "duplicate", "late", "beyond"]
"""Why trajectories wait no longer, or never did.

whole: every repetition has come · overdue: its deadline has · evicted: others needed its room · left over: the stream
ended · duplicate: its group waits, and holds it already · late: its group has left · beyond: the group has no such
repetition.
"""


class Flush(NamedTuple):
    """Trajectories of one group that leave the stash together, or are not let in."""

    group: GroupId
    mask: int
    """Which repetitions."""
    why: Why
    pieces: Sequence[TrajectoryGroup] = ()
    """What there is of a group that leaves, in the order in which it came; nothing of what is refused."""


@dataclass(slots=True)
class _PendingGroup:
    """A group that waits."""

    due_s: float
    mask: int = 0
    nbytes: int = 0
    pieces: list[TrajectoryGroup] = field(default_factory=list)


class GroupBuffer:
    """The stash. Groups of `group_size` repetitions, from 0, each due `deadline_s` seconds after its first piece.

    >>> from penstock.testing import group
    >>> assembly = GroupBuffer(2, deadline_s=None, max_groups=8, max_bytes=2**20, max_closed=128)
    >>> pieces = [group(completion_lengths=[3], repetition_ids=[repetition]) for repetition in (0, 1, 0)]
    >>> [[parting.why for parting in assembly.take(piece, now_s=0)] for piece in pieces]
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
        """In the order of their first pieces, and so of their deadlines."""
        self._nbytes = 0
        self._closed: dict[GroupId, None] = {}
        """In the order in which they closed."""

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
        """When `expire` has something to do; infinity where nothing waits for a deadline."""
        return next(iter(self._waiting.values())).due_s if self._waiting else math.inf

    def take(self, piece: TrajectoryGroup, now_s: float) -> list[Flush]:
        """A piece has come. What is to wait is copied, so that it keeps nobody's slot.

        Groups that are due by now leave before it is looked at.
        """
        parted, group, come = self.expire(now_s), piece.id, mask_of(piece.repetition_ids.tolist())
        wanted = come & self._whole
        gathering = self._waiting.get(group)
        again = wanted & gathering.mask if gathering else 0
        late = wanted if group in self._closed else 0
        refused: list[tuple[int, Why]] = [(come & ~wanted, "beyond"), (again, "duplicate"), (late, "late")]
        parted += [Flush(group, mask, why) for mask, why in refused if mask]
        fresh = exclude(piece, come & ~wanted | again | late)
        if fresh is not None and len(fresh):
            parted += self._gather(group, wanted & ~again, fresh, gathering or _PendingGroup(now_s + self._deadline_s))
        return parted

    def expire(self, now_s: float) -> list[Flush]:
        """The groups that are due by now."""
        overdue: list[Flush] = []
        while self.due_s <= now_s:
            overdue.append(self._close_oldest("overdue"))
        return overdue

    def finish(self) -> list[Flush]:
        """Nothing more comes: all that waits."""
        return [self._close_oldest("left over") for _ in range(self.groups)]

    def _gather(self, group: GroupId, mask: int, piece: TrajectoryGroup, gathering: _PendingGroup) -> list[Flush]:
        """`piece` holds what `gathering` lacks."""
        gathering.mask |= mask
        if gathering.mask == self._whole:
            gathering.pieces.append(piece)
            return [self._close(group, gathering, "whole")]
        nbytes = piece.nbytes
        gathering.pieces.append(piece.owned())
        gathering.nbytes += nbytes
        self._nbytes += nbytes
        self._waiting[group] = gathering
        return self._make_room(group, gathering)

    def _make_room(self, group: GroupId, grown: _PendingGroup) -> list[Flush]:
        """The oldest make way for the one that has grown, unless that has grown beyond what all may take."""
        if grown.nbytes > self._max_bytes:
            return [self._close(group, grown, "evicted")]
        evicted: list[Flush] = []
        while self.groups > self._max_groups or self._nbytes > self._max_bytes:
            evicted.append(self._close_oldest("evicted"))
        return evicted

    def _close_oldest(self, why: Why) -> Flush:
        return self._close(*next(iter(self._waiting.items())), why)

    def _close(self, group: GroupId, gathering: _PendingGroup, why: Why) -> Flush:
        if self._waiting.pop(group, None) is not None:
            self._nbytes -= gathering.nbytes
        self._closed[group] = None
        if self.closed > self._max_closed:
            del self._closed[next(iter(self._closed))]
        return Flush(group, gathering.mask, why, gathering.pieces)
