"""The report of a run as tables."""

from __future__ import annotations

from io import StringIO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from .statistics import Report, StageStatistics

PLAIN_WIDTH = 120
"""Columns of a report as text, which may be written anywhere."""

REASONS_SHOWN = 3
"""Reasons for each end state, those that came most often."""


def plain(report: Report) -> str:
    """Return the tables as text without colours."""
    console = Console(file=StringIO(), width=PLAIN_WIDTH, color_system=None, force_jupyter=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(tables(report))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def tables(report: Report) -> RenderableType:
    """Return the result, the balance of the ledger and the stages as tables."""
    return Group(_result(report), Text(), _balance(report), Text(), _stages(report))


def _result(report: Report) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_row("ended", Text(report.stop_reason, style="bold"))
    grid.add_row("seconds", f"{report.seconds:,.1f}")
    grid.add_row("steps", f"{report.steps:,}")
    if report.nothing_learned:
        grid.add_row("learned", Text(f"nothing: {report.nothing_learned}", overflow="fold"))
    grid.add_row("checkpoint", Text(report.checkpoint or "none", overflow="fold"))
    grid.add_row("to resume", Text(report.to_resume, overflow="fold"))
    return grid


def _balance(report: Report) -> Table:
    """Return the balance of the ledger."""
    table = Table("trajectories", "", "reasons", box=None, padding=(0, 1), pad_edge=False)
    table.columns[1].justify = "right"
    table.add_row("begun", f"{report.balance.admitted:,}", "")
    for state, count in report.balance.ended.items():
        if count:
            table.add_row(state, f"{count:,}", Text(_reasons(report.balance.reasons[state])))
    return table


def _reasons(counts: dict[str, int]) -> str:
    """Return the most frequent reasons, with their counts: `13 too old, 2 too long`; empty where none was given."""
    named = sorted(((count, reason) for reason, count in counts.items() if reason), reverse=True)
    more = [f"{len(named) - REASONS_SHOWN} more"] if len(named) > REASONS_SHOWN else []
    return ", ".join([f"{count:,} {reason}" for count, reason in named[:REASONS_SHOWN]] + more)


def _stages(report: Report) -> Table:
    titles = ("stage", "where", "state", "waited for records", "for credit", "dropped")
    table = Table(*titles, box=None, padding=(0, 1), pad_edge=False)
    for stage in report.statistics.stages:
        table.add_row(stage.name, _where(stage), stage.state, *_waits(stage), _dropped(stage))
    return table


def _where(stage: StageStatistics) -> str:
    """Return the placement, and the restarts that happened: `2 processes, at most 1 restart …; 1 restarted`."""
    restarted = sum(worker.restarts for worker in stage.workers)
    return stage.placement + (f"; {restarted} restarted" if restarted else "")


def _waits(stage: StageStatistics) -> tuple[str, str]:
    return f"{stage.waited_for_records_s:,.1f} s", f"{stage.waited_for_credit_s:,.1f} s"


def _dropped(stage: StageStatistics) -> str:
    return ", ".join(f"{count:,} {state}" for state, count in stage.dropped.items())
