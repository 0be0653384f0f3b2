"""Save and show the results of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

from .run import Run, Summary

__all__ = ["kept", "show_summary"]


@contextmanager
def kept(run: Run) -> Iterator[Run]:
    """Save and show the results of `run` however the body ends, also by Ctrl-C."""
    console = Console()
    try:
        console.print("warming up on demonstrations with mistakes …")
        yield run
    except Exception:
        run.end("failed")
        raise
    finally:
        run.end("interrupted")  # unless it ended for another reason before
        show_summary(run, run.keep(), console)


def show_summary(run: Run, summary: Summary, console: Console) -> None:
    """Print the results before and after, the report, and the folder."""
    console.print(f"\n{summary.stop_reason} after {summary.seconds:.0f} s and {summary.steps} optimizer steps")
    console.print(_before_and_after(run, summary))
    if run.report is not None:
        console.print(run.report)
    console.print(f"kept in {run.folder}", highlight=False, soft_wrap=True)


def _before_and_after(run: Run, summary: Summary) -> Table:
    table = Table("", "before", "after", title=f"chain_sum, seed {summary.seed}")
    before = "—" if summary.accuracy_before is None else f"{summary.accuracy_before:.1%}"
    table.add_row("accuracy, held out, greedy", before, f"{summary.accuracy_after:.1%}")
    if run.rewards:
        table.add_row("reward, sampled", f"{run.rewards[0]:.2f}", f"{run.rewards[-1]:.2f}")
    return table
