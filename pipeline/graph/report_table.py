"""The report of a run as tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from io import StringIO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..accounting.balance import Balance
from ..util.readable import Readable
from .statistics import StageStatistics

PLAIN_WIDTH = 120
"""Columns of a report as text, for any destination."""

REASONS_SHOWN = 3
"""Reasons for each end state, those that came most often."""


def plain(facts: Mapping[str, str], balance: Balance, stages: Iterable[StageStatistics]) -> str:
    """Return the tables as text without colours."""
    console = Console(file=StringIO(), width=PLAIN_WIDTH, color_system=None, force_jupyter=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(tables(facts, balance, stages))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def tables(facts: Mapping[str, str], balance: Balance, stages: Iterable[StageStatistics]) -> RenderableType:
    """Return the facts about a run by name, the balance of its ledger and its stages as tables."""
    return Readable(Group(_result(facts), Text(), _balance(balance), Text(), _stages(stages)))


def _result(facts: Mapping[str, str]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for number, (name, fact) in enumerate(facts.items()):
        grid.add_row(name, Text(fact, style="" if number else "bold", overflow="fold"))
    return grid


def _balance(balance: Balance) -> Table:
    table = Table("trajectories", "", "reasons", box=None, padding=(0, 1), pad_edge=False)
    table.columns[1].justify = "right"
    table.add_row("begun", f"{balance.admitted:,}", "")
    for state, count in balance.ended.items():
        if count:
            table.add_row(state, f"{count:,}", Text(_reasons(balance.reasons[state])))
    return table


def _reasons(counts: dict[str, int]) -> str:
    """Return the most frequent reasons, with their counts: `13 too old, 2 too long`; empty without any."""
    named = sorted(((count, reason) for reason, count in counts.items() if reason), reverse=True)
    more = [f"{len(named) - REASONS_SHOWN} more"] if len(named) > REASONS_SHOWN else []
    return ", ".join([f"{count:,} {reason}" for count, reason in named[:REASONS_SHOWN]] + more)


def _stages(stages: Iterable[StageStatistics]) -> Table:
    titles = ("stage", "where", "state", "waited for records", "for credit", "dropped")
    table = Table(*titles, box=None, padding=(0, 1), pad_edge=False)
    for stage in stages:
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
