"""The guards of a run that makes no progress: it warns, and then ends by name.

1. Rollouts failed in a row, and none succeeded between them: `RolloutsFailed`.
2. Trajectories ended in a row, and none was trained between them: a warning, and at ten times as many `NothingTrained`.
3. No prompt of an epoch may be sampled: `NothingTrained`, after one epoch.

Counted where ends are counted, by counters of the ledger that only grow, of all workers together. So it needs no order
between processes: while no success is added, all that ended since the last check ended in a row. Trajectories in flight
do not count, so a first step may take any time.

Two bounds on failures are not among its cases, for they count other things than the ledger. A reward function that
fails may give its trajectories a number to train with: `RewardFunctionFailed` counts its calls. The plug-in for SkyRL
answers a repetition that failed three times with a row that does not train, and counts those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from ..._schemas import GroupId
from ..errors import NothingTrained, RolloutsFailed
from .ledger import Ledger, ProgressCounts
from .reasons import first_reasons, reasons_by_state
from .telemetry import get_logger

log = get_logger("penstock.progress")

FAILURE_LIMIT = 64
"""Failed rollouts in a row, in the whole run, that end it: as many as eight groups of eight."""

LEAST_WARNED_AT = 1024
"""Trajectories in a row without a trained one that make a run warn: 128 groups of eight."""

WARNED_AT_STEPS = 10
"""The same in optimizer steps, where their size is known; the larger number counts."""

ENDED_AT_WARNINGS = 10
"""Ends at so many times the number of the warning."""

ENDED_PER_WAITING = 2000
"""Ended trajectories for each that waits for the rest of its batch, or is sampled: with fewer, a step will come."""

CHECK_EVERY = 16
"""Trajectories that end between two checks."""

LOOK_EVERY = 512
"""Ended trajectories between two looks at those that wait."""

Reasons: TypeAlias = Mapping[str, Mapping[str, int]]

REMEDIES: dict[str, str] = {
    "filtered": "See what the reward functions return for the samples of the run (penstock samples), whether all "
    "completions are cut (max_completion_tokens), and what the stages filter",
    "stale": "Raise max_lag, sample less ahead, or see whether the samplers get the weights",
    "rejected": "Raise the bound on prompts, or see why the stages reject records",
    "failed": "Fix what fails; the first traceback of each error is in the log",
    "lost": "See how the workers died",
}
"""The remedy where most trajectories end so."""


@dataclass(slots=True)
class Streak:
    """Measures how often something happened since the last success."""

    successes: int = 0
    """Successes at the last check."""
    before: int = 0
    """Count at the last check that found more successes."""

    def length(self, happened: int, successes: int) -> int:
        """Return how often it happened in a row. `happened` must have been read before `successes`."""
        if successes != self.successes:
            self.successes, self.before = successes, happened
        return happened - self.before


@dataclass(slots=True)
class _Row:
    """Counts of the trajectories that ended since the last success."""

    next_look: int = LOOK_EVERY
    held: dict[GroupId, int] = field(default_factory=dict)
    """Trajectories that were in flight when the row had `held_at`, and have not ended since."""
    held_at: int = 0
    reasons: Reasons = field(default_factory=dict)
    """The reasons of all ends of the run, at the first look; empty before the first success."""
    warned: bool = False


class ProgressGuard:
    """Checks one run; called after trajectories have ended.

    Args:
        ledger: of the run.
        per_step: trajectories of an optimizer step, where a stage states them.
        delivered: returns the number of records that left the pipeline by a sink that does not train, each a success.
    """

    def __init__(self, ledger: Ledger, *, per_step: int = 0, delivered: Callable[[], int] = lambda: 0) -> None:
        self._ledger = ledger
        self._stated = per_step
        self._per_step = per_step
        self._delivered = delivered
        self._checked_at = 0
        """Trajectories that had ended here at the last check."""
        self._failed, self._untrained = Streak(), Streak()
        self._row = _Row()

    def check(self) -> None:
        """Check the present counts.

        Raises:
            RolloutsFailed: `FAILURE_LIMIT` rollouts failed in a row.
            NothingTrained: too many trajectories ended in a row without a trained one, or no prompt may be sampled.
        """
        ended = self._ledger.ended_here
        if ended - self._checked_at < CHECK_EVERY:
            return
        self._checked_at = ended
        progress = self._ledger.progress()
        if (failed := self._failed.length(progress.failed, progress.succeeded)) >= FAILURE_LIMIT:
            raise RolloutsFailed(self._of_failures(failed, progress))
        epoch = self._ledger.epoch
        if epoch.none_fits and not progress.succeeded and progress.rejected >= epoch.trajectories:
            raise NothingTrained(self._of_prompts(progress))
        self._check_trained(progress)

    def _of_failures(self, in_a_row: int, progress: ProgressCounts) -> str:
        return (
            f"expected at least one of {FAILURE_LIMIT} rollouts in a row to succeed, got {in_a_row} failures and no "
            f"success between them ({progress.failed} failures, {progress.succeeded} successes in all): "
            f"{first_reasons(self._ledger.balance().reasons['failed'])}. Fix the environment; the first traceback of "
            f"each error is in the log"
        )

    def _of_prompts(self, progress: ProgressCounts) -> str:
        reasons = self._ledger.balance().reasons["rejected"]
        return (
            f"expected a prompt that may be sampled, got none in a whole epoch: {progress.rejected:,} trajectories "
            f"rejected ({first_reasons(reasons)}). Raise the bound on prompts, or shorten them"
        )

    # -- trained trajectories ------------------------------------------------------------------------------------------

    def _check_trained(self, progress: ProgressCounts) -> None:
        successes = progress.trained + self._delivered()
        if successes != self._untrained.successes:
            self._per_step = max(self._stated, successes - self._untrained.successes)
            self._row = _Row()
        in_a_row = self._untrained.length(progress.untrained, successes)
        if in_a_row >= self._row.next_look:
            self._look(in_a_row)

    def _look(self, in_a_row: int) -> None:
        """Warn, or end the run, where the row is too long for the trajectories that wait to be trained."""
        row, looked_at = self._row, self._row.held_at
        waiting = self._waiting(in_a_row)
        least = max(LEAST_WARNED_AT, WARNED_AT_STEPS * self._per_step)
        limit = max(ENDED_AT_WARNINGS * least, ENDED_PER_WAITING * waiting, self._ledger.epoch.trajectories)
        # Of those in flight at the first look past the limit, the next look shows which wait for others.
        if in_a_row >= limit and (looked_at >= limit or not self._hold(in_a_row)):
            raise NothingTrained(
                f"expected at least one of {limit:,} trajectories in a row to be trained, got {in_a_row:,} that ended "
                f"otherwise: {self._reasons()}. {self._remedy()}"
            )
        row.next_look = in_a_row + LOOK_EVERY if in_a_row >= limit else min(in_a_row + LOOK_EVERY, limit)
        if in_a_row >= max(least, WARNED_AT_STEPS * waiting) and not row.warned:
            row.warned = True
            log.warning(
                "nothing_trained",
                in_a_row=in_a_row,
                waiting=waiting,
                reasons=self._reasons(),
                ends_at=limit,
                remedy=self._remedy(),
            )

    def _waiting(self, in_a_row: int) -> int:
        """Return the number of trajectories in flight for so long that they must wait for others.

        Those of an earlier look that have not ended since; of a look that is half as old as the row, at most.
        """
        row, in_flight = self._row, dict(self._ledger.trajectories.open)
        row.held = {group: left for group, mask in row.held.items() if (left := mask & in_flight.get(group, 0))}
        waiting = sum(mask.bit_count() for mask in row.held.values())
        if not row.held_at and self._untrained.successes:
            row.reasons = self._ledger.balance().reasons
        if in_a_row >= 2 * row.held_at:
            self._hold(in_a_row)
        return waiting

    def _hold(self, in_a_row: int) -> bool:
        """Note the trajectories in flight, for later looks; return whether there are any."""
        self._row.held, self._row.held_at = dict(self._ledger.trajectories.open), in_a_row
        return bool(self._row.held)

    def _ends(self) -> Reasons:
        """Return the ends of the row since the first look, by state and reason; all where that was just now."""
        now = self._ledger.balance().reasons
        since = {state: dict(Counter(now[state]) - Counter(self._row.reasons.get(state, {}))) for state in now}
        return since if any(since.values()) else now

    def _reasons(self) -> str:
        return reasons_by_state(self._ends())

    def _remedy(self) -> str:
        ends = {state: sum(counts.values()) for state, counts in self._ends().items()}
        return REMEDIES.get(max(ends, key=ends.__getitem__, default=""), REMEDIES["filtered"])
