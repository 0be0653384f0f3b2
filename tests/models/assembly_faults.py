"""Assemblies with one small fault each, for test_mutants: every one breaks a rule that is known by name."""

# ruff: noqa: ARG002 (not to heed an argument may well be the fault)

from __future__ import annotations

from typing import Any

from penstock import GroupId, TrajectoryGroup
from penstock.pipeline.assembly import Assembly, Parting, Why
from penstock.pipeline.repetitions import mask_of

__all__ = [
    "BeginsAnew",
    "ClosesBeforeItLeaves",
    "EveryPieceIsGivenTime",
    "EvictionsAreNotTold",
    "ExpiresASecondLate",
    "ExpiresOneAtATime",
    "KeepsTheRest",
    "KeepsTheSlot",
    "LeavesTooEarly",
    "LeavesTwice",
    "MergesCopies",
    "NobodyMakesWay",
    "RemembersForEver",
    "RoomIsNotGivenBack",
    "SwallowsInPassing",
    "SwallowsTheLate",
    "TakesCopiesForLate",
    "TheLastComeLeaveFirst",
    "TheLateStretchTheirGroup",
    "TheNewestMakesWay",
    "WaitsForMore",
]


class MergesCopies(Assembly):
    """What waits is not compared with what comes."""

    def take(self, piece: TrajectoryGroup, now_s: float) -> list[Parting]:
        gathering = self._waiting.get(piece.id)
        if gathering is not None:
            gathering.mask = 0
        return super().take(piece, now_s)


class TakesCopiesForLate(Assembly):
    """A copy is not told from a straggler."""

    def take(self, piece: TrajectoryGroup, now_s: float) -> list[Parting]:
        parted = super().take(piece, now_s)
        return [parting._replace(why="late") if parting.why == "duplicate" else parting for parting in parted]


class BeginsAnew(Assembly):
    """A group that has left is forgotten at once."""

    def _close(self, group: GroupId, gathering: Any, why: Why) -> Parting:
        parting = super()._close(group, gathering, why)
        self._closed.clear()
        return parting


class RemembersForEver(Assembly):
    """No group that has left is ever forgotten."""

    def _close(self, group: GroupId, gathering: Any, why: Why) -> Parting:
        self._max_closed += 1
        return super()._close(group, gathering, why)


class TheLateStretchTheirGroup(Assembly):
    """Who comes late is noted as if its group had left just now."""

    def take(self, piece: TrajectoryGroup, now_s: float) -> list[Parting]:
        parted = super().take(piece, now_s)
        if any(parting.why == "late" for parting in parted):
            self._closed.pop(piece.id)
            self._closed[piece.id] = None
        return parted


class LeavesTooEarly(Assembly):
    """Two make a group of three."""

    def _gather(self, group: GroupId, mask: int, piece: TrajectoryGroup, gathering: Any) -> list[Parting]:
        parted = super()._gather(group, mask, piece, gathering)
        if group in self._waiting and gathering.mask.bit_count() == 2:
            parted.append(self._close(group, gathering, "whole"))
        return parted


class WaitsForMore(Assembly):
    """A group of three takes a fourth."""

    def __init__(self, group_size: int, **options: Any) -> None:
        super().__init__(group_size + 1, **options)


class EveryPieceIsGivenTime(Assembly):
    """The deadline counts from the last piece."""

    def take(self, piece: TrajectoryGroup, now_s: float) -> list[Parting]:
        parted = super().take(piece, now_s)
        if (gathering := self._waiting.get(piece.id)) is not None:
            gathering.due_s = now_s + self._deadline_s
        return parted


class ExpiresASecondLate(Assembly):
    """A group waits beyond its deadline."""

    def expire(self, now_s: float) -> list[Parting]:
        return super().expire(now_s - 1)


class ExpiresOneAtATime(Assembly):
    """Of groups that are due together, the others leave another time."""

    def expire(self, now_s: float) -> list[Parting]:
        return [self._close_oldest("overdue")] if self.due_s <= now_s else []


class RoomIsNotGivenBack(Assembly):
    """Bytes of what has left still count."""

    def _close(self, group: GroupId, gathering: Any, why: Why) -> Parting:
        before = self._nbytes
        parting = super()._close(group, gathering, why)
        self._nbytes = before
        return parting


class NobodyMakesWay(Assembly):
    """The stash takes what comes."""

    def _make_room(self, group: GroupId, grown: Any) -> list[Parting]:
        return []


class TheNewestMakesWay(Assembly):
    """Who came last leaves first."""

    def _make_room(self, group: GroupId, grown: Any) -> list[Parting]:
        crowded = self.groups > self._max_groups or self.nbytes > self._max_bytes
        return [self._close(group, grown, "evicted")] if crowded else []


class EvictionsAreNotTold(Assembly):
    """Who makes way is gone."""

    def _make_room(self, group: GroupId, grown: Any) -> list[Parting]:
        super()._make_room(group, grown)
        return []


class LeavesTwice(Assembly):
    """A group that has left whole waits on."""

    def _close(self, group: GroupId, gathering: Any, why: Why) -> Parting:
        waits = group in self._waiting
        parting = super()._close(group, gathering, why)
        if why == "whole" and waits:
            self._waiting[group] = gathering
            self._nbytes += gathering.nbytes
        return parting


class SwallowsTheLate(Assembly):
    """Of what is late nothing is told."""

    def take(self, piece: TrajectoryGroup, now_s: float) -> list[Parting]:
        return [parting for parting in super().take(piece, now_s) if parting.why != "late"]


class SwallowsInPassing(Assembly):
    """Of a piece that is refused in part, the rest is not taken."""

    def take(self, piece: TrajectoryGroup, now_s: float) -> list[Parting]:
        refused = mask_of(piece.repetition_ids.tolist()) & ~self._whole
        if refused:
            return [*self.expire(now_s), Parting(piece.id, refused, "beyond")]
        return super().take(piece, now_s)


class TheLastComeLeaveFirst(Assembly):
    """Groups that are due together leave in any order."""

    def expire(self, now_s: float) -> list[Parting]:
        return super().expire(now_s)[::-1]


class KeepsTheSlot(Assembly):
    """What waits lies where it came from."""

    def _gather(self, group: GroupId, mask: int, piece: TrajectoryGroup, gathering: Any) -> list[Parting]:
        parted = super()._gather(group, mask, piece, gathering)
        gathering.pieces[-1] = piece
        return parted


class ClosesBeforeItLeaves(Assembly):
    """A group that waits is taken for one that has left."""

    def _gather(self, group: GroupId, mask: int, piece: TrajectoryGroup, gathering: Any) -> list[Parting]:
        parted = super()._gather(group, mask, piece, gathering)
        self._closed[group] = None
        return parted


class KeepsTheRest(Assembly):
    """What waits when the stream ends waits on."""

    def finish(self) -> list[Parting]:
        return []
