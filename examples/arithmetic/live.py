"""Display a run and its summary: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import anyio
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.accounting import EdgeStatistics, PipelineStatistics, StageStatistics

from .run import RECENT, Run, Summary

__all__ = ["kept", "show_summary", "view", "watched"]

REFRESH_S = 0.25
LINE_EVERY = 10
"""Optimizer steps between plain lines."""

SPARKS = "▁▂▃▄▅▆▇█"


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


@asynccontextmanager
async def watched(run: Run) -> AsyncIterator[None]:
    """Show `run` within the body."""
    console = Console()
    console.print(f"reinforcement from {run.accuracy:.1%} of the held-out problems")
    if not console.is_terminal:
        run.on_step(lambda: _print_line(run, console))
        yield
        return
    with Live(console=console, auto_refresh=False) as live:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_refresh, run, live)
            yield
            tasks.cancel_scope.cancel()
        live.update(view(run), refresh=True)


async def _refresh(run: Run, live: Live) -> None:
    while True:
        live.update(view(run), refresh=True)
        await anyio.sleep(REFRESH_S)


def _print_line(run: Run, console: Console) -> None:
    if len(run.steps) % LINE_EVERY == 0:
        shown = ", ".join(f"{name} {value}" for name, value in _figures(run).items())
        console.print(f"step {len(run.steps)}: {shown}", soft_wrap=True, highlight=False)


# -- during the run ----------------------------------------------------------------------------------------------


def view(run: Run) -> RenderableType:
    """Return the current view."""
    statistics = run.pipeline.statistics() if run.pipeline else PipelineStatistics(stages=(), edges=())
    return Group(_progress(run), _stages(statistics))


def _figures(run: Run) -> dict[str, str]:
    """Return reward, accuracy, tokens per second and lag, as text."""
    recent = run.steps[-RECENT:]
    return {
        "reward": f"{mean_of(run.rewards[-1:]):.2f}",
        "accuracy": f"{run.accuracy:.1%}",
        "tokens/s": f"{mean_of([step['perf/throughput'] for step in recent]):,.0f}",
        "lag": f"{mean_of([step['staleness/mean'] for step in recent]):.1f}",
    }


def mean_of(values: Sequence[float]) -> float:
    """Return the mean of `values`; 0 if there are none."""
    return sum(values) / max(1, len(values))


def _progress(run: Run) -> RenderableType:
    figures = "   ".join(f"{name} [bold]{value}[/]" for name, value in _figures(run).items())
    curves = Table.grid(padding=(0, 2))
    curves.add_row("reward", Text(_sparkline(run.rewards), style="green"))
    curves.add_row("accuracy", Text(_sparkline(list(run.accuracies.values())), style="cyan"))
    return Group(Text.from_markup(f"step [bold]{len(run.steps)}[/], {run.seconds:.0f} s   {figures}"), curves)


def _sparkline(values: Sequence[float], width: int = 30) -> str:
    """Return `values`, 0 to 1, as at most `width` small bars."""
    share = max(1, -(-len(values) // width))
    means = [mean_of(values[i : i + share]) for i in range(0, len(values), share)]
    return "".join(SPARKS[min(len(SPARKS) - 1, max(0, int(mean * len(SPARKS))))] for mean in means)


def _stages(statistics: PipelineStatistics) -> Table:
    """Return a table of the stages: the reason that each waits, and the channel before it with its fill."""
    table = Table("stage", "where", "waits for", "waited", "channel before it", "passed", box=None, padding=(0, 1))
    for column in table.columns:
        column.no_wrap = True
    for stage, edge in zip(statistics.stages, (None, *statistics.edges), strict=False):
        where, _, _ = stage.placement.partition(",")
        table.add_row(stage.name, where, stage.waiting_for or "—", _waited(stage), *_channel(edge))
    return table


def _waited(stage: StageStatistics) -> str:
    return f"{stage.waited_for_records_s + stage.waited_for_credit_s:.0f} s"


def _channel(edge: EdgeStatistics | None) -> tuple[RenderableType, str]:
    """Return the fill of a channel, and the number of trajectories that passed it."""
    if edge is None:
        return "", ""
    channel = edge.channel
    fill = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=1, completed=channel.fill, width=8)
    fill.add_row(bar, f"{channel.items}/{channel.capacity} {channel.transport}")
    return fill, f"{edge.trajectories:,}"


# -- after the run -----------------------------------------------------------------------------------------------


def show_summary(run: Run, summary: Summary, console: Console) -> None:
    """Print the results before and after, the ledger's balance, and the folder."""
    console.print(f"\n{summary.stop_reason} after {summary.seconds:.0f} s and {summary.steps} optimizer steps")
    console.print(_before_and_after(run, summary), _balance(run, summary))
    console.print(f"in flight when training ended: {summary.in_flight_at_end:,} trajectories, now counted as lost")
    console.print(f"kept in {run.folder}", highlight=False, soft_wrap=True)


def _before_and_after(run: Run, summary: Summary) -> Table:
    table = Table("", "before", "after", title=f"chain_sum, seed {summary.seed}")
    before = "—" if summary.accuracy_before is None else f"{summary.accuracy_before:.1%}"
    table.add_row("accuracy, held out, greedy", before, f"{summary.accuracy_after:.1%}")
    if run.rewards:
        table.add_row("reward, sampled", f"{run.rewards[0]:.2f}", f"{run.rewards[-1]:.2f}")
    return table


def _balance(run: Run, summary: Summary) -> Table:
    table = Table("trajectories", "", "why", title="the ledger's balance")
    reasons = run.report.balance.reasons if run.report else {}
    table.add_row("admitted", f"{summary.ledger['admitted']:,}", "")
    for state, count in summary.ledger["ended"].items():
        if count:
            table.add_row(state, f"{count:,}", ", ".join(filter(None, reasons.get(state, {}))))
    table.add_row("in flight", f"{summary.ledger['in_flight']:,}", "")
    return table
