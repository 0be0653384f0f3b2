"""Check a run that ended by itself: every stage accounted for the records that it received, and some were trained.

A run that was cancelled, stopped or failed is not checked: its report has the result.
"""

from __future__ import annotations

from ..accounting.failure_streak import first_reasons
from ..accounting.ledger import SWALLOWED
from ..errors import NothingTrained, RecordsSwallowed
from ..graph.statistics import Report

END_OF_STREAM = "end of stream"
"""`Report.stop_reason` of a run whose stages all returned by themselves, with empty channels between them."""


def check_outcome(report: Report, step: int) -> None:
    """Check the result of a run; `step` is its last optimizer step, those before a resumption included.

    Raises:
        RecordsSwallowed: stages received trajectories, and neither sent nor dropped them.
        NothingTrained: the sink received no record, and the run that this one resumes trained none. A sink may do
            anything with received records, as long as it records their end in the ledger.
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
            f"expected every stage to send or drop the records that it receives, got stages that did neither with "
            f"some: {names}. Is `await` missing before outbox.send(record)? A stage leaves a record out with "
            f"drop(record, 'filtered', reason), a sink records its use with current().ledger.end(record, 'trained')"
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
