"""Check a run that ended by itself: every stage passed on what it received, and something was trained.

A run that was cancelled, stopped or failed is not judged: what it came to is in its report.
"""

from __future__ import annotations

from .errors import NothingTrained, RecordsSwallowed
from .failure_streak import first_reasons
from .statistics import Report

__all__ = ["END_OF_STREAM", "SWALLOWED", "check_outcome"]

END_OF_STREAM = "end of stream"
"""`Report.stop_reason` of a run whose stages all returned by themselves, with nothing left between them."""

SWALLOWED = "swallowed by "
"""Begins the reason of what is lost because a stage received it and neither sent nor dropped it."""


def check_outcome(report: Report, step: int) -> None:
    """Hold a run to what it was for; `step` is its last optimizer step, those before a resumption included.

    Raises:
        RecordsSwallowed: stages received trajectories, and neither sent nor dropped them.
        NothingTrained: the sink received nothing, and nothing was trained in a run that this one goes on from. What a
            sink does with what it received is its own business, as long as it says so in the ledger.
    """
    if report.stop_reason != END_OF_STREAM:
        return
    unaccounted = {
        reason.removeprefix(SWALLOWED): count
        for reason, count in report.balance.reasons["lost"].items()
        if reason.startswith(SWALLOWED)
    }
    if unaccounted:
        names = " and ".join(f"{name} ({count} trajectories)" for name, count in unaccounted.items())
        raise RecordsSwallowed(
            f"expected every stage to send or drop what it receives, got nothing more of what these received: {names}. "
            f"Is `await` missing before outbox.send(record)? A stage says what it leaves out with drop(record, "
            f"'filtered', reason), a sink what it has used with current().ledger.end(record, 'trained')"
        )
    if not step and not report.statistics.edges[-1].channel.received:
        raise NothingTrained(
            f"expected a run that ends by itself to train at least one trajectory, got none: {_ends(report)}"
        )


def _ends(report: Report) -> str:
    """Return how the trajectories of a run ended, with the most frequent reasons."""
    balance = report.balance
    if not balance.admitted:
        return "the source sent nothing"
    ends = [
        f"{count} {state} ({first_reasons(balance.reasons[state])})" for state, count in balance.ended.items() if count
    ]
    return f"{balance.admitted} trajectories were begun, {'; '.join(ends)}"
