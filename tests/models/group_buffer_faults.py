"""Assemblies with one small fault each, for test_mutants: each breaks a named rule."""

# ruff: noqa: ARG002 (not to heed an argument may well be the fault)

from __future__ import annotations

from typing import Any

from penstock import GroupId, TrajectoryGroup
from penstock._pipeline.accounting.repetition_sets import mask_of
from penstock._stages.sampling.group_buffer import Flush, GroupBuffer, Why

__all__ = [
    "BeginsAnew",
    "ClosesBeforeItLeaves",
    "EveryPieceIsGivenTime",
    "EvictionsAreNotReported",
    "ExpiresASecondLate",
    "ExpiresOneAtATime",
    "KeepsTheRest",
    "KeepsTheSlot",
    "LatePiecesAreLost",
    "LatePiecesRenewTheirGroup",
    "LeavesTooEarly",
    "LeavesTwice",
    "MergesCopies",
    "NothingIsEvicted",
    "RemembersForEver",
    "RoomIsNotGivenBack",
    "TakesCopiesForLate",
    "TheLastLeaveFirst",
    "TheNewestIsEvicted",
    "TheRestOfAPieceIsLost",
    "WaitsForMore",
]


class MergesCopies(GroupBuffer):
    """Waiting pieces are not compared with new ones."""

    def take(self, piece: TrajectoryGroup, now_s: float) -> list[Flush]:
        pending = self._waiting.get(piece.id)
        if pending is not None:
            pending.mask = 0
        return super().take(piece, now_s)


class TakesCopiesForLate(GroupBuffer):
    """A copy is treated as a late piece."""

    def take(self, piece: TrajectoryGroup, now_s: float) -> list[Flush]:
        parted = super().take(piece, now_s)
        return [parting._replace(why="late") if parting.why == "duplicate" else parting for parting in parted]


class BeginsAnew(GroupBuffer):
    """A group that has left is forgotten at once."""

    def _close(self, group: GroupId, pending: Any, why: Why) -> Flush:
        parting = super()._close(group, pending, why)
        self._closed.clear()
        return parting


class RemembersForEver(GroupBuffer):
    """No group that has left is ever forgotten."""

    def _close(self, group: GroupId, pending: Any, why: Why) -> Flush:
        self._max_closed += 1
        return super()._close(group, pending, why)


class LatePiecesRenewTheirGroup(GroupBuffer):
    """A late piece renews the time at which its group left."""

    def take(self, piece: TrajectoryGroup, now_s: float) -> list[Flush]:
        parted = super().take(piece, now_s)
        if any(parting.why == "late" for parting in parted):
            self._closed.pop(piece.id)
            self._closed[piece.id] = None
        return parted


class LeavesTooEarly(GroupBuffer):
    """Two make a group of three."""

    def _add(self, group: GroupId, mask: int, piece: TrajectoryGroup, pending: Any) -> list[Flush]:
        parted = super()._add(group, mask, piece, pending)
        if group in self._waiting and pending.mask.bit_count() == 2:
            parted.append(self._close(group, pending, "whole"))
        return parted


class WaitsForMore(GroupBuffer):
    """A group of three takes a fourth."""

    def __init__(self, group_size: int, **options: Any) -> None:
        super().__init__(group_size + 1, **options)


class EveryPieceIsGivenTime(GroupBuffer):
    """The deadline counts from the last piece."""

    def take(self, piece: TrajectoryGroup, now_s: float) -> list[Flush]:
        parted = super().take(piece, now_s)
        if (pending := self._waiting.get(piece.id)) is not None:
            pending.due_s = now_s + self._deadline_s
        return parted


class ExpiresASecondLate(GroupBuffer):
    """A group waits beyond its deadline."""

    def expire(self, now_s: float) -> list[Flush]:
        return super().expire(now_s - 1)


class ExpiresOneAtATime(GroupBuffer):
    """Of groups that are due together, the others leave another time."""

    def expire(self, now_s: float) -> list[Flush]:
        return [self._close_oldest("overdue")] if self.due_s <= now_s else []


class RoomIsNotGivenBack(GroupBuffer):
    """Bytes of groups that have left still count."""

    def _close(self, group: GroupId, pending: Any, why: Why) -> Flush:
        before = self._nbytes
        parting = super()._close(group, pending, why)
        self._nbytes = before
        return parting


class NothingIsEvicted(GroupBuffer):
    """The buffer has no bound."""

    def _make_room(self, group: GroupId, grown: Any) -> list[Flush]:
        return []


class TheNewestIsEvicted(GroupBuffer):
    """The newest group is evicted."""

    def _make_room(self, group: GroupId, grown: Any) -> list[Flush]:
        crowded = self.groups > self._max_groups or self.nbytes > self._max_bytes
        return [self._close(group, grown, "evicted")] if crowded else []


class EvictionsAreNotReported(GroupBuffer):
    """An evicted group is not reported."""

    def _make_room(self, group: GroupId, grown: Any) -> list[Flush]:
        super()._make_room(group, grown)
        return []


class LeavesTwice(GroupBuffer):
    """A group that has left whole still waits."""

    def _close(self, group: GroupId, pending: Any, why: Why) -> Flush:
        waits = group in self._waiting
        parting = super()._close(group, pending, why)
        if why == "whole" and waits:
            self._waiting[group] = pending
            self._nbytes += pending.nbytes
        return parting


class LatePiecesAreLost(GroupBuffer):
    """Late pieces are not reported."""

    def take(self, piece: TrajectoryGroup, now_s: float) -> list[Flush]:
        return [parting for parting in super().take(piece, now_s) if parting.why != "late"]


class TheRestOfAPieceIsLost(GroupBuffer):
    """The rest of a partly refused piece is lost."""

    def take(self, piece: TrajectoryGroup, now_s: float) -> list[Flush]:
        refused = mask_of(piece.rollout_ids.tolist()) & ~self._whole
        if refused:
            return [*self.expire(now_s), Flush(piece.id, refused, "beyond")]
        return super().take(piece, now_s)


class TheLastLeaveFirst(GroupBuffer):
    """Groups that are due together leave in any order."""

    def expire(self, now_s: float) -> list[Flush]:
        return super().expire(now_s)[::-1]


class KeepsTheSlot(GroupBuffer):
    """Waiting pieces are not copied."""

    def _add(self, group: GroupId, mask: int, piece: TrajectoryGroup, pending: Any) -> list[Flush]:
        parted = super()._add(group, mask, piece, pending)
        pending.pieces[-1] = piece
        return parted


class ClosesBeforeItLeaves(GroupBuffer):
    """A waiting group is treated as one that has left."""

    def _add(self, group: GroupId, mask: int, piece: TrajectoryGroup, pending: Any) -> list[Flush]:
        parted = super()._add(group, mask, piece, pending)
        self._closed[group] = None
        return parted


class KeepsTheRest(GroupBuffer):
    """Waiting groups stay when the stream ends."""

    def finish(self) -> list[Flush]:
        return []
