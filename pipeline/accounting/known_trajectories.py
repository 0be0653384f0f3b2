"""The trajectories that a ledger knows: those in flight, and those that were trained, as bit masks by group.

A copy is one that was handed over before and is in flight, or was trained. Counts no ends.
"""

from __future__ import annotations

from collections.abc import Collection

from ..._schemas import GroupId, TrainBatch, TrajectoryGroup, TrajectoryId
from ..errors import LedgerImbalance
from .committed_prompts import CommittedPrompts
from .end_states import EndState
from .repetition_sets import iter_bits, masks_by_group, set_mask


class KnownTrajectories:
    """Tells new trajectories from copies, and those in flight from those that have ended."""

    def __init__(self) -> None:
        self.open: dict[GroupId, int] = {}
        """Repetitions in flight of each group."""
        self.in_flight: int = 0
        """Their number."""
        self._begun: dict[GroupId, int] = {}
        """The repetitions among them that were admitted and have not been handed over yet."""
        self.committed: CommittedPrompts = CommittedPrompts()
        """Those that were trained."""

    def known(self, group: GroupId) -> int:
        """Return the repetitions of `group` that are in flight or were trained."""
        return self.open.get(group, 0) | self.committed.mask(group)

    def is_open(self, trajectory: TrajectoryId) -> bool:
        """Return whether the trajectory is in flight."""
        return bool(self.open.get(trajectory.group, 0) >> trajectory.repetition_id & 1)

    def begin(self, group: GroupId, mask: int) -> int:
        """Add trajectories of which sampling begins; return those that were not in flight already.

        Raises:
            LedgerImbalance: one of them was trained before: ids are never reused within a run.
        """
        if again := self.committed.mask(group) & mask:
            raise LedgerImbalance(
                f"{_name(group, again)} was trained before and is admitted again: expected ids that are never reused"
            )
        new = mask & ~self.open.get(group, 0)
        self.add(group, new)
        set_mask(self._begun, group, self._begun.get(group, 0) | new)
        return new

    def hand_over(self, group: GroupId, mask: int) -> tuple[int, int]:
        """Add trajectories that are handed over; return those that were not in flight before, and the copies."""
        present, begun = self.open.get(group, 0), self._begun.get(group, 0)
        copies = mask & (present & ~begun | self.committed.mask(group))
        new = mask & ~(present | copies)
        if new:
            self.add(group, new)
        if begun:
            set_mask(self._begun, group, begun & ~mask)
        return new, copies

    def take_back(self, record: TrajectoryGroup | TrainBatch) -> None:
        """Let `record` be handed over again."""
        for group, mask in masks_by_group(record):
            set_mask(self._begun, group, self._begun.get(group, 0) | mask & self.open.get(group, 0))

    def add(self, group: GroupId, new: int) -> None:
        """Add trajectories that are not in flight."""
        self.open[group] = self.open.get(group, 0) | new
        self.in_flight += new.bit_count()

    def add_absent(self, leaving: Collection[tuple[GroupId, int]]) -> int:
        """Add those that are not in flight; return their number."""
        before = self.in_flight
        for group, mask in leaving:
            self.add(group, mask & ~self.open.get(group, 0))
        return self.in_flight - before

    def remove(self, leaving: Collection[tuple[GroupId, int]]) -> int:
        """Remove trajectories that are in flight; return their number."""
        before = self.in_flight
        for group, mask in leaving:
            set_mask(self.open, group, self.open[group] & ~mask)
            if group in self._begun:
                set_mask(self._begun, group, self._begun[group] & ~mask)
            self.in_flight -= mask.bit_count()
        return before - self.in_flight

    def check_batch(self, entering: Collection[tuple[GroupId, int]]) -> None:
        """Refuse a batch with copies."""
        for group, mask in entering:
            if copies := mask & self.known(group) & ~self._begun.get(group, 0):
                raise LedgerImbalance(
                    f"{_name(group, copies)} is in flight or was trained, and arrives again in a batch: expected a "
                    f"batch without copies, because a batch cannot go on in part"
                )

    def check_open(self, leaving: Collection[tuple[GroupId, int]], state: EndState) -> None:
        """Refuse the end of trajectories that are not in flight."""
        for group, mask in leaving:
            if absent := mask & ~self.open.get(group, 0):
                raise LedgerImbalance(
                    f"{_name(group, absent)} ended as {state} but is not in flight: "
                    f"expected every trajectory to be admitted once and to end once"
                )

    def check_untrained(self, group: GroupId, mask: int, earlier: int) -> None:
        """Refuse to train trajectories again: those that were trained, or `earlier` in the same step."""
        if again := (self.committed.mask(group) | earlier) & mask:
            raise LedgerImbalance(f"{_name(group, again)} was trained before and is committed again")


def _name(group: GroupId, mask: int) -> str:
    return f"{group.env}/{group.instance_id} repetitions {list(iter_bits(mask))}"
