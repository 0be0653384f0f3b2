"""The outcome of a run, from its report.

A run that ended by itself is checked: every stage accounted for the records that it received, and some were trained. Of
a run that a signal has stopped, the result is printed, the path of its checkpoint, and how to resume it.
"""

from __future__ import annotations

from ..accounting.constant_steps import STEPS_IN_A_ROW, ConstantSteps
from ..accounting.ledger import Ledger
from ..accounting.progress_guard import REMEDIES
from ..accounting.reasons import reasons_by_state
from ..accounting.telemetry import get_logger
from ..errors import NothingTrained, RecordsSwallowed
from ..graph.report import Report

log = get_logger("penstock.pipeline")

END_OF_STREAM = "end of stream"
"""`Report.stop_reason` of a run whose stages all returned by themselves, with empty channels between them."""


def check_outcome(report: Report, ledger: Ledger, *, commits: bool) -> None:
    """Check the result of a run.

    Args:
        report: of the run.
        ledger: of the run.
        commits: true if the sink commits what is trained. Another one may do anything with received records, as long as
            it records their end in the ledger.

    Raises:
        RecordsSwallowed: stages received trajectories, and neither sent nor dropped them.
        NothingTrained: the run ended by itself, and neither it nor the run that it resumes has trained, or no step had
            a gradient from rewards.
    """
    if report.stop_reason == END_OF_STREAM and ledger.unaccounted:
        names = " and ".join(f"{name} ({count} trajectories)" for name, count in ledger.unaccounted.items())
        raise RecordsSwallowed(
            f"expected every stage to send or drop the records that it receives, got stages that did neither with "
            f"some: {names}. Is `await` missing before outbox.send(record)? A stage leaves a record out with "
            f"drop(record, 'filtered', reason), a sink records its use with current().ledger.end(record, 'trained')"
        )
    if report.stop_reason not in {END_OF_STREAM, f"{report.statistics.stages[-1].name} returned"}:
        return  # it may have been stopped before it had a channel
    used = report.balance.ended["trained"] or (not commits and report.statistics.edges[-1].channel.received)
    if not ledger.step and not used:
        raise NothingTrained(
            f"expected a run that ends by itself to train at least one trajectory, got none: {_ends(report)}"
        )
    if ledger.constant_steps is not None:
        _refuse_or_warn(ledger.constant_steps, report.steps)


def _refuse_or_warn(constant: ConstantSteps, done: int) -> None:
    """Raise where no step of the policy had a gradient; warn where steps are few, or an earlier run did others."""
    if done == constant.steps >= STEPS_IN_A_ROW:
        raise NothingTrained(f"expected a run that learns from its rewards, got {constant}. {REMEDIES['filtered']}")
    log.warning("no_learning_signal", step=done, steps_in_a_row=constant.steps, constant=constant.constant)


def _ends(report: Report) -> str:
    """Return the ends of the trajectories of a run, with the most frequent reasons."""
    balance = report.balance
    if not balance.admitted:
        return "the source sent nothing"
    return f"{balance.admitted} trajectories were begun, {reasons_by_state(balance.reasons)}"


def stop_message(report: Report) -> str:
    """Return the lines to print about a run that was stopped."""
    return "\n".join(
        [
            f"the run was {report.stop_reason}"
            if report.stop_reason.startswith("stopped")
            else f"ended: {report.stop_reason}",
            f"  after {report.seconds:.0f} s; {_counts(report)}",
            f"  checkpoint: {report.checkpoint or _no_checkpoint(report)}",
            f"  to resume: {report.to_resume}",
        ]
    )


def _counts(report: Report) -> str:
    """Return the balance in a line."""
    parts = [f"{count} {state}" for state, count in report.balance.ended.items() if count]
    return f"{report.balance.admitted} trajectories = {' + '.join(parts) or '0'}"


def _no_checkpoint(report: Report) -> str:
    if report.folder:
        return "none was written by this run"
    return "none, for there is no folder for one: give Pipeline.run(folder=...)"
