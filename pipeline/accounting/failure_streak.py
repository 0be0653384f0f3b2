"""The limit on failed rollouts in a row: a run whose rollouts all fail ends, and says why.

One streak a run. It is computed from two counters that only grow, failures and successes of all workers together, so it
needs no order between processes: while no success is added, all failures since the last check are in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..errors import RolloutsFailed
from .shared_counters import OTHER_REASONS, UNREPORTED

FAILURE_LIMIT = 64
"""Failed rollouts in a row, in the whole run, at which it ends: eight groups of eight in which every rollout failed."""

UNSPECIFIC = {OTHER_REASONS, UNREPORTED}
"""Reasons that name no cause."""

REASONS_SHOWN = 3
"""Reasons that a message lists, those that came most often."""


@dataclass(slots=True)
class FailureStreak:
    """Measure how many rollouts failed since the last success."""

    succeeded: int = 0
    """Successes at the last check."""
    failed_before: int = 0
    """Failures at the last check that found more successes."""

    def check(self, failed: int, succeeded: int, reasons: Callable[[], Mapping[str, int]]) -> None:
        """Check the current values of both counters; `failed` must have been read before `succeeded`.

        Raises:
            RolloutsFailed: `FAILURE_LIMIT` rollouts failed in a row; the message lists the most frequent `reasons`.
        """
        if succeeded != self.succeeded:
            self.succeeded, self.failed_before = succeeded, failed
        in_a_row = failed - self.failed_before
        if in_a_row >= FAILURE_LIMIT:
            raise RolloutsFailed(
                f"expected at least one of {FAILURE_LIMIT} rollouts in a row to succeed, got {in_a_row} failures and "
                f"no success between them ({failed} failures, {succeeded} successes in all): "
                f"{first_reasons(reasons())}. Fix the environment; the first traceback of each error is in the log"
            )


def first_reasons(reasons: Mapping[str, int]) -> str:
    """Return the most frequent of `reasons`, each with its count; those that name no cause come last."""
    most = sorted(reasons.items(), key=lambda item: (item[0] in UNSPECIFIC, -item[1]))
    listed = [f"{count} × {reason}" if reason else str(count) for reason, count in most[:REASONS_SHOWN]]
    more = [f"{len(most) - REASONS_SHOWN} more reasons"] if len(most) > REASONS_SHOWN else []
    return ", ".join(listed + more)
