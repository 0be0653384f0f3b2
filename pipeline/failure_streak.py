"""The limit on failed rollouts in a row: a run whose rollouts all fail ends, and says why.

One streak a run. It is read off two counters that only grow, failures and successes of all workers together, so that it
needs no order between processes: as long as no success was added, all failures since the last look are in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .errors import RolloutsFailed
from .processes.shared_counters import OTHER_REASONS, UNTOLD

__all__ = ["FAILURE_LIMIT", "FailureStreak", "first_reasons"]

FAILURE_LIMIT = 64
"""Failed rollouts in a row, in the whole run, with which it ends: eight groups of eight of which nothing is left."""

REASONS_SHOWN = 3
"""Reasons that a message lists, those that came most often."""


class FailureStreak:
    """Measure how many rollouts failed since the last success."""

    __slots__ = ("_failed_before", "_succeeded")

    def __init__(self) -> None:
        self._succeeded = 0
        """Successes at the last look."""
        self._failed_before = 0
        """Failures when the number of successes was last seen to grow."""

    def check(self, failed: int, succeeded: int, reasons: Callable[[], Mapping[str, int]]) -> None:
        """Take in both counters as they are now; `failed` must have been read before `succeeded`.

        Raises:
            RolloutsFailed: `FAILURE_LIMIT` rollouts failed in a row; the message lists the most frequent `reasons`.
        """
        if succeeded != self._succeeded:
            self._succeeded, self._failed_before = succeeded, failed
        in_a_row = failed - self._failed_before
        if in_a_row >= FAILURE_LIMIT:
            raise RolloutsFailed(
                f"expected at least one of {FAILURE_LIMIT} rollouts in a row to succeed, got {in_a_row} failures and "
                f"no success between them ({failed} failures, {succeeded} successes in all): "
                f"{first_reasons(reasons())}. Mend the environment; the first traceback of each error is in the log"
            )


def first_reasons(reasons: Mapping[str, int]) -> str:
    """Return the most frequent of `reasons`, each with its count; those that say nothing of the cause come last."""
    most = sorted(reasons.items(), key=lambda item: (_says_nothing(item[0]), -item[1]))
    listed = [f"{count} × {reason}" if reason else str(count) for reason, count in most[:REASONS_SHOWN]]
    more = [f"{len(most) - REASONS_SHOWN} more reasons"] if len(most) > REASONS_SHOWN else []
    return ", ".join(listed + more)


def _says_nothing(reason: str) -> bool:
    """Return whether `reason` gathers others, or stands for one that its worker has not told yet."""
    return reason == OTHER_REASONS or reason.startswith(UNTOLD)
