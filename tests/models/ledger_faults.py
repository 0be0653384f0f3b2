"""Ledgers with one small fault each, for test_mutants: every one breaks a rule that is known by name."""

# ruff: noqa: ARG002 (not to heed an argument may well be the fault)

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
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
    "CopiesAreTheWorkers",
    "EndsCountTwice",
    "EndsWhatHasEnded",
    "FailedSendsCount",
    "ForgetsWhatWasTrained",
    "LosesNothing",
    "NobodyHearsOfCopies",
    "SendsCopies",
    "SettlesWithoutCounting",
    "TakesCopies",
    "TakesOverWithoutSaying",
    "TheDeadAreForgotten",
    "WorkersAreNotHeard",
]


class EndsCountTwice(Ledger):
    """An end is counted twice."""

    def _count(self, state: EndState, reason: str, count: int) -> None:
        super()._count(state, reason, 2 * count)


class TakesOverWithoutSaying(Ledger):
    """What was taken over from a worker counts as in flight in both places."""

    def take_over(self, record: Any, origin: Origin | None = None, counters: SharedCounters | None = None) -> int:
        refused = super().take_over(record, origin, counters)
        if counters is not None:
            counters.taken_over -= len(record)
        return refused


class TakesCopies(Ledger):
    """What is in flight already is taken over once more."""

    def take_over(self, record: Any, origin: Origin | None = None, counters: SharedCounters | None = None) -> int:
        super().take_over(record, origin, counters)
        return 0


class SendsCopies(Ledger):
    """What was handed over already goes once more."""

    def hand_over(self, record: Any) -> int:
        super().hand_over(record)
        return 0


class CopiesAreTheWorkers(Ledger):
    """A copy is refused, and left in the counters of the worker that it came from."""

    def take_over(self, record: Any, origin: Origin | None = None, counters: SharedCounters | None = None) -> int:
        refused = super().take_over(record, origin, counters)
        if counters is not None:
            counters.taken_over -= refused.bit_count()
        return refused


class NobodyHearsOfCopies(Ledger):
    """A worker is not told that a copy was refused."""

    def take_over(self, record: Any, origin: Origin | None = None, counters: SharedCounters | None = None) -> int:
        entered = False

        def report_later(*ended: Any) -> None:
            if entered and origin is not None:
                origin(*ended)

        refused = super().take_over(record, report_later, counters)
        entered = True
        return refused


class FailedSendsCount(Ledger):
    """What could not be sent was sent."""

    def take_back(self, record: Any) -> None:
        """Not at all."""


class AdmitsAgain(Ledger):
    """What is in flight is admitted once more."""

    def admit(self, group: GroupId, repetitions: Iterable[int]) -> int:
        listed = list(repetitions)
        new = super().admit(group, listed)
        if not new:
            self._admitted += len(listed)
        return len(listed)


class WorkersAreNotHeard(Ledger):
    """What a worker counts stays with it."""

    def attach_counters(self, counters: SharedCounters) -> None:
        super().attach_counters(SharedCounters(bytearray(counters._words.nbytes)))


class TheDeadAreForgotten(Ledger):
    """What a dead worker held is in nobody's books."""

    def detach_counters(self, counters: SharedCounters, reason: str) -> int:
        self._worker_counters = [each for each in self._worker_counters if each is not counters]
        return 0


class ClosesTwice(Ledger):
    """A worker that died twice lost twice."""

    def detach_counters(self, counters: SharedCounters, reason: str) -> int:
        closed = super().detach_counters(counters, reason)
        if not closed and counters not in self._worker_counters:
            self._count("lost", reason, 1)
            self._admitted += 1
        return closed


class AllowancesAreNotFreed(Ledger):
    """A worker that hears of an end makes no room."""

    def settle(self, group: GroupId, mask: int, state: EndState, step: int) -> None:
        self.step = max(self.step, step)


class SettlesWithoutCounting(Ledger):
    """A worker that hears of an end forgets the trajectory, and not how it ended."""

    def settle(self, group: GroupId, mask: int, state: EndState, step: int) -> None:
        before = self._ended.copy()
        super().settle(group, mask, state, step)
        self._ended = before


class EndsWhatHasEnded(Ledger):
    """What is not in flight may end."""

    def end(self, what: TrajectoryGroup | Iterable[TrajectoryId], state: EndState, reason: str = "") -> None:
        ids = list(what.ids if isinstance(what, TrajectoryGroup) else what)
        super().end([one for one in ids if self.is_open(one)], state, reason)


class CommitsHalf(Ledger):
    """A batch that is refused was counted up to where it is wrong."""

    def commit(self, batch: TrainBatch, step: int) -> None:
        try:
            super().commit(batch, step)
        except LedgerImbalance:
            for one in batch.ids:
                if self.is_open(one):
                    self._leave([(one.group, 1 << one.repetition_id)], "trained", "")
            raise


class CommitsTheLastPiece(Ledger):
    """Where a prompt stands in several places of a batch, only what comes last is trained."""

    def commit(self, batch: TrainBatch, step: int) -> None:
        self._expect_no_copies(batch)
        last = {packed.id: place for place, packed in enumerate(batch.groups)}
        keep = np.array([last[packed.id] == place for place, packed in enumerate(batch.groups)])
        super().commit(batch.select(keep), step)

    def _expect_no_copies(self, batch: TrainBatch) -> None:
        if len(set(batch.ids)) != len(batch.ids):
            raise LedgerImbalance("a batch holds a copy")


class CommitsAgain(Ledger):
    """What was trained may be trained again."""

    def commit(self, batch: TrainBatch, step: int) -> None:
        with suppress(LedgerImbalance):
            super().commit(batch, step)


class ForgetsWhatWasTrained(Ledger):
    """A committed id may come back."""

    def commit(self, batch: TrainBatch, step: int) -> None:
        super().commit(batch, step)
        self._committed = CommittedPrompts()


class LosesNothing(Ledger):
    """At the end of a run, what is in flight is left so."""

    def lose(self, reason: str) -> int:
        return sum(self.detach_counters(counters, reason) for counters in list(self._worker_counters))
