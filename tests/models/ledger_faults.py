"""Ledgers with one small fault each, for test_mutants: each breaks a named rule."""

# ruff: noqa: ARG002 (not to heed an argument may well be the fault)

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np

from penstock import GroupId, TrainBatch, TrajectoryGroup, TrajectoryId
from penstock._pipeline.accounting.end_states import EndState
from penstock.accounting import CommittedPrompts, Ledger
from penstock.errors import LedgerImbalance

__all__ = [
    "AdmitsAgain",
    "ArrivalsAreNotAdmitted",
    "CommitsAgain",
    "CommitsHalf",
    "CommitsTheLastPiece",
    "CopiesAreNotCounted",
    "DeadWorkersAreForgotten",
    "EndsCountTwice",
    "EndsWhatHasEnded",
    "FailedSendsCount",
    "ForgetsWhatWasTrained",
    "LosesNothing",
    "SendsCopies",
    "SuccessesAreForgotten",
    "UnsentIsForgotten",
    "UnsentIsNotAdmitted",
    "UnsentMayBeAnothers",
]


class EndsCountTwice(Ledger):
    """An end is counted twice."""

    def _count(self, state: EndState, reason: str, count: int) -> None:
        super()._count(state, reason, 2 * count)


class SendsCopies(Ledger):
    """Trajectories that were handed over are sent again."""

    def hand_over(self, record: Any) -> int:
        super().hand_over(record)
        return 0


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


class EndsWhatHasEnded(Ledger):
    """A trajectory that is not in flight may end."""

    def end(self, what: TrajectoryGroup | Iterable[TrajectoryId], state: EndState, reason: str = "") -> None:
        ids = list(what.ids if isinstance(what, TrajectoryGroup) else what)
        super().end([one for one in ids if self.trajectories.is_open(one)], state, reason)


class CommitsHalf(Ledger):
    """A refused batch is counted up to its error."""

    def commit(self, batch: TrainBatch, step: int) -> None:
        try:
            super().commit(batch, step)
        except LedgerImbalance:
            for one in batch.ids:
                if self.trajectories.is_open(one):
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
        self.trajectories.committed = CommittedPrompts()


class LosesNothing(Ledger):
    """Trajectories in flight at the end of a run stay in flight."""

    def end_all(self, state: EndState, reason: str) -> int:
        return 0


class DeadWorkersAreForgotten(Ledger):
    """Trajectories of a dead worker are forgotten."""

    def end(self, what: TrajectoryGroup | Iterable[TrajectoryId], state: EndState, reason: str = "") -> None:
        if state != "lost":
            super().end(what, state, reason)


class ArrivalsAreNotAdmitted(Ledger):
    """Trajectories that were not admitted before they arrive never are."""

    def hand_over(self, record: TrajectoryGroup | TrainBatch) -> int:
        before = self._admitted
        refused = super().hand_over(record)
        self._admitted = before
        return refused


class CopiesAreNotCounted(Ledger):
    """A refused copy has no end."""

    def _reject_copies(self, group: GroupId, copies: int) -> None:
        """Do nothing."""


class UnsentIsForgotten(Ledger):
    """Ends that a worker reports before it has sent are not counted."""

    def end_unsent(self, group: GroupId, mask: int, state: EndState, reason: str) -> None:
        """Do nothing."""


class UnsentIsNotAdmitted(Ledger):
    """Ends that a worker reports before it has sent are counted, and nothing is admitted."""

    def end_unsent(self, group: GroupId, mask: int, state: EndState, reason: str) -> None:
        before = self._admitted
        super().end_unsent(group, mask, state, reason)
        self._admitted = before


class UnsentMayBeAnothers(Ledger):
    """Ends that a worker reports count, though another one has sent the trajectories."""

    def end_unsent(self, group: GroupId, mask: int, state: EndState, reason: str) -> None:
        self._admitted += mask.bit_count()
        self._count(state, reason, mask.bit_count())


class SuccessesAreForgotten(Ledger):
    """A rollout that succeeded is not counted."""

    def succeed(self, count: int = 1) -> None:
        """Do nothing."""
