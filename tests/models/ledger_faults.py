"""Ledgers with one small fault each, for test_mutants: each breaks a named rule."""

# ruff: noqa: ARG002 (not to heed an argument may well be the fault)

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from copy import deepcopy
from typing import Any

import numpy as np

from penstock import GroupId, TrainBatch, TrajectoryGroup, TrajectoryId
from penstock._pipeline.accounting.ledger import Origin
from penstock._pipeline.accounting.shared_counters import EndState, SharedCounters
from penstock.accounting import CommittedPrompts, Ledger
from penstock.errors import LedgerImbalance

__all__ = [
    "AdmitsAgain",
    "AllowancesAreNotFreed",
    "ClosesTwice",
    "CommitsAgain",
    "CommitsHalf",
    "CommitsTheLastPiece",
    "CopiesAreNotReported",
    "CopiesAreTheWorkers",
    "DeadWorkersAreForgotten",
    "EndsCountTwice",
    "EndsWhatHasEnded",
    "FailedSendsCount",
    "ForgetsWhatWasTrained",
    "LosesNothing",
    "ReportsAreIgnored",
    "SendsCopies",
    "SettlesWithoutCounting",
    "TakesCopies",
    "TakesOverWithoutReporting",
]


class EndsCountTwice(Ledger):
    """An end is counted twice."""

    def _count(self, state: EndState, reason: str, count: int) -> None:
        super()._count(state, reason, 2 * count)


class TakesOverWithoutReporting(Ledger):
    """Trajectories taken over from a worker count as in flight in both processes."""

    def take_over(self, record: Any, origin: Origin | None = None, counters: SharedCounters | None = None) -> int:
        refused = super().take_over(record, origin, counters)
        if counters is not None:
            counters.taken_over -= len(record)
        return refused


class TakesCopies(Ledger):
    """Trajectories in flight are taken over again."""

    def take_over(self, record: Any, origin: Origin | None = None, counters: SharedCounters | None = None) -> int:
        super().take_over(record, origin, counters)
        return 0


class SendsCopies(Ledger):
    """Trajectories that were handed over are sent again."""

    def hand_over(self, record: Any) -> int:
        super().hand_over(record)
        return 0


class CopiesAreTheWorkers(Ledger):
    """A copy is refused, and left in the counters of its worker."""

    def take_over(self, record: Any, origin: Origin | None = None, counters: SharedCounters | None = None) -> int:
        refused = super().take_over(record, origin, counters)
        if counters is not None:
            counters.taken_over -= refused.bit_count()
        return refused


class CopiesAreNotReported(Ledger):
    """A refused copy is not reported to its worker."""

    def take_over(self, record: Any, origin: Origin | None = None, counters: SharedCounters | None = None) -> int:
        entered = False

        def report_later(*ended: Any) -> None:
            if entered and origin is not None:
                origin(*ended)

        refused = super().take_over(record, report_later, counters)
        entered = True
        return refused


class FailedSendsCount(Ledger):
    """A failed send counts as sent."""

    def take_back(self, record: Any) -> None:
        """Do nothing."""


class AdmitsAgain(Ledger):
    """Trajectories in flight are admitted again."""

    def admit(self, group: GroupId, repetitions: Iterable[int]) -> int:
        listed = list(repetitions)
        new = super().admit(group, listed)
        if not new:
            self._admitted += len(listed)
        return len(listed)


class ReportsAreIgnored(Ledger):
    """The counters of a worker are not read."""

    def attach_counters(self, counters: SharedCounters) -> None:
        super().attach_counters(SharedCounters(bytearray(counters._words.nbytes)))


class DeadWorkersAreForgotten(Ledger):
    """Trajectories of a dead worker are forgotten."""

    def detach_counters(self, counters: SharedCounters, state: EndState, reason: str) -> int:
        self._worker_counters = [each for each in self._worker_counters if each is not counters]
        return 0


class ClosesTwice(Ledger):
    """A worker that died twice lost twice."""

    def detach_counters(self, counters: SharedCounters, state: EndState, reason: str) -> int:
        closed = super().detach_counters(counters, state, reason)
        if not closed and counters not in self._worker_counters:
            self._count(state, reason, 1)
            self._admitted += 1
        return closed


class AllowancesAreNotFreed(Ledger):
    """An end that is reported to a worker frees no allowance."""

    def settle(self, group: GroupId, mask: int, state: EndState, step: int) -> None:
        self.step = max(self.step, step)


class SettlesWithoutCounting(Ledger):
    """An end that is reported to a worker removes the trajectory, and is not counted."""

    def settle(self, group: GroupId, mask: int, state: EndState, step: int) -> None:
        before = deepcopy(self._ends)
        super().settle(group, mask, state, step)
        self._ends = before


class EndsWhatHasEnded(Ledger):
    """A trajectory that is not in flight may end."""

    def end(self, what: TrajectoryGroup | Iterable[TrajectoryId], state: EndState, reason: str = "") -> None:
        ids = list(what.ids if isinstance(what, TrajectoryGroup) else what)
        super().end([one for one in ids if self.is_open(one)], state, reason)


class CommitsHalf(Ledger):
    """A refused batch is counted up to its error."""

    def commit(self, batch: TrainBatch, step: int) -> None:
        try:
            super().commit(batch, step)
        except LedgerImbalance:
            for one in batch.ids:
                if self.is_open(one):
                    self._leave([(one.group, 1 << one.repetition_id)], "trained", "")
            raise


class CommitsTheLastPiece(Ledger):
    """Of a prompt at several positions of a batch, only the last is trained."""

    def commit(self, batch: TrainBatch, step: int) -> None:
        self._expect_no_copies(batch)
        last = {packed.id: place for place, packed in enumerate(batch.groups)}
        keep = np.array([last[packed.id] == place for place, packed in enumerate(batch.groups)])
        super().commit(batch.select(keep), step)

    def _expect_no_copies(self, batch: TrainBatch) -> None:
        if len(set(batch.ids)) != len(batch.ids):
            raise LedgerImbalance("a batch holds a copy")


class CommitsAgain(Ledger):
    """A trained trajectory may be trained again."""

    def commit(self, batch: TrainBatch, step: int) -> None:
        with suppress(LedgerImbalance):
            super().commit(batch, step)


class ForgetsWhatWasTrained(Ledger):
    """A committed id may be admitted again."""

    def commit(self, batch: TrainBatch, step: int) -> None:
        super().commit(batch, step)
        self._committed = CommittedPrompts()


class LosesNothing(Ledger):
    """Trajectories in flight at the end of a run stay in flight."""

    def end_all(self, state: EndState, reason: str) -> int:
        return sum(self.detach_counters(counters, state, reason) for counters in list(self._worker_counters))
