"""The message of a run that a signal has stopped: its result, the path of its checkpoint, and how to resume it."""

from __future__ import annotations

from pathlib import Path

from ..graph.statistics import Report


def stop_message(report: Report, folder: str | Path | None) -> str:
    """Return the lines to print about a run that was stopped; `folder` is that of `Pipeline.run`, if any."""
    return "\n".join(
        [
            f"the run was {report.stop_reason}"
            if report.stop_reason.startswith("stopped")
            else f"ended: {report.stop_reason}",
            f"  after {report.seconds:.0f} s; {_counts(report)}",
            f"  checkpoint: {report.checkpoint or _no_checkpoint(folder)}",
            f"  to resume: {_to_resume(report, folder)}",
        ]
    )


def _counts(report: Report) -> str:
    """Return the balance in a line; trajectories that were in flight are listed apart from lost ones."""
    parts = [f"{count} {state}" for state, count in report.ended.items() if count]
    if report.in_flight:
        parts.append(f"{report.in_flight} in flight, not trained")
    return f"{report.balance.admitted} trajectories = {' + '.join(parts) or '0'}"


def _no_checkpoint(folder: str | Path | None) -> str:
    if folder is not None:
        return "none was written by this run"
    return "none, for there is no folder for one: give Pipeline.run(folder=...)"


def _to_resume(report: Report, folder: str | Path | None) -> str:
    if folder is not None:
        return f"start the script again: it continues from the newest checkpoint in {folder}"
    if report.checkpoint:
        return f"call trainer.resume({report.checkpoint!r}) before the run"
    return "not possible: the next run starts from the beginning"
