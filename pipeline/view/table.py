"""A run as a table: its metrics, and a row for each stage."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..graph.statistics import EdgeStatistics, StageStatistics
from ..util.readable import Readable
from .sample_text import heading, one_line, place
from .snapshot import Snapshot, duration, number

WIDE = 100
"""The least columns of a terminal for the waits in all."""


def table(shown: Snapshot) -> RenderableType:
    """Return the state of a run."""
    head = Text.assemble((shown.steps(), "bold"), "   ", "   ".join([shown.times(), *shown.speeds()]))
    return Readable(Group(head, _metrics(shown), _Stages(shown), _totals(shown), _samples(shown)))


def _metrics(shown: Snapshot) -> Table:
    """Return each metric that is emitted, with its last value and its course."""
    grid = Table.grid(padding=(0, 2))
    for name, last, bars in shown.progress.metrics:
        grid.add_row(name, Text(number(last), style="bold"), Text(bars, style="cyan"))
    return grid


@dataclass(frozen=True, slots=True)
class _Stages:
    """A row for each stage: its wait, the channel before it, and in a wide terminal its waits in all."""

    shown: Snapshot

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the rows. The cause of a wait is the cell that a narrow terminal shortens."""
        waits = ("records", "credit") if options.max_width >= WIDE else ()
        rows = Table(box=None, padding=(0, 1), pad_edge=False)
        for title in ("stage", "where", "waits for", "channel before"):
            rows.add_column(title, no_wrap=title != "waits for")
        for title in ("passed", *waits):
            rows.add_column(title, no_wrap=True, justify="right", min_width=len(title))
        statistics = self.shown.statistics
        for stage, edge in zip(statistics.stages, chain([None], statistics.edges), strict=False):
            waited = _waited(stage)[: len(waits)]
            rows.add_row(stage.name, _where(stage), _one_line(_wait(stage)), *_channel(edge), *waited)
        yield rows


def _where(stage: StageStatistics) -> str:
    """Return the placement of a stage, and the restarts of its workers."""
    where, _, _ = stage.placement.partition(",")
    restarts = sum(worker.restarts for worker in stage.workers)
    return f"{where}, {restarts} died" if restarts else where


def _wait(stage: StageStatistics) -> Text:
    """Return the cause of a stage's wait, or its state where it does not run."""
    if stage.state != "running":
        return Text(stage.state, style="dim")
    return Text(stage.waiting_for) if stage.waiting_for else Text("busy", style="green")


def _waited(stage: StageStatistics) -> tuple[str, str]:
    return duration(stage.waited_for_records_s), duration(stage.waited_for_credit_s)


def _channel(edge: EdgeStatistics | None) -> tuple[RenderableType, str]:
    """Return the fill of a channel, and the number of trajectories that passed it."""
    if edge is None:
        return "", ""
    channel = edge.channel
    fill = Table.grid(padding=(0, 1))
    fill.add_column()
    fill.add_column(no_wrap=True)
    bar = ProgressBar(total=1, completed=channel.fill, width=5)
    fill.add_row(bar, f"{channel.items}/{channel.capacity} {channel.transport}")
    return fill, f"{edge.trajectories:,}"


def _totals(shown: Snapshot) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_row("trajectories", shown.trajectories())
    grid.add_row("memory", ", ".join(shown.memory_parts()))
    if shown.finding is not None:
        grid.add_row("finding", Text(str(shown.finding), style="yellow"))
    return grid


def _samples(shown: Snapshot) -> Table:
    """Return the best and the worst of the last samples, each text in one line."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for sample in shown.progress.samples:
        style = "green" if sample.kind == "best" else "red"
        grid.add_row(Text(f"{sample.kind} of {place(sample)}", style=style), _one_line(Text(heading(sample))))
        grid.add_row("  prompt", _one_line(Text(one_line(sample.prompt), style="dim")))
        grid.add_row("  completion", _one_line(Text(one_line(sample.completion))))
        if sample.answer is not None:
            grid.add_row("  right answer", _one_line(Text(one_line(sample.answer), style="dim")))
    return grid


def _one_line(text: Text) -> Text:
    """Have a cell cut where its column is narrower, in a column that rich makes narrower before the others."""
    text.no_wrap, text.overflow = True, "ellipsis"
    return text
