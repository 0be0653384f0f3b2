"""Show a run while it runs. A view that fails is logged and ends: watching a run must never end it."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import anyio

from ..accounting.telemetry import get_logger
from ..graph.context import Context
from ..graph.report import Report
from ..graph.statistics import PipelineStatistics
from ..util.blocking import in_thread
from ..util.exception_groups import unwrap_single
from ..util.printing import print_line

if TYPE_CHECKING:
    from .display import Display
    from .snapshot import Watched

log = get_logger("penstock.view")

View: TypeAlias = Literal["auto", "live", "lines"]
"""live: a table on the terminal of stderr · lines: plain lines on stderr · auto: live where stderr is a terminal."""


OUTPUT_TIMEOUT_S = 5.0
"""Bound on showing a line, the beginning or the end: a terminal that is stopped by Ctrl-S takes no output."""


async def say(view: View | None, line: str) -> None:
    """Print a line about the preparation of a run, unless `view` is None."""
    if view is not None:
        with anyio.move_on_after(OUTPUT_TIMEOUT_S):
            await in_thread(print_line, line)


@asynccontextmanager
async def watching(
    view: View | None,
    context: Context,
    statistics: Callable[[], PipelineStatistics],
    report: Callable[[], Report | None],
    *,
    max_steps: int | None,
    folder: Path | None,
    config: Mapping[str, Any],
) -> AsyncIterator[None]:
    """Show a run within the body, the run.

    Args:
        view: how; None where it is not shown here.
        context: of the run: its ledger, and its metrics.
        statistics: returns those of the run now.
        report: returns the report once the run has ended, and None before.
        max_steps: the last step of the run; None if unknown.
        folder: of the run, whose view is written there for other processes; None for no file.
        config: its hyper-parameters, for the diagnosis.
    """
    from ..diagnosis.running import RunningDiagnosis  # noqa: PLC0415 (most processes that import penstock show nothing)
    from .progress import Progress  # noqa: PLC0415 (as above)
    from .snapshot import Watched  # noqa: PLC0415 (as above)

    watched = Watched(Progress(max_steps), context.ledger, statistics, report, RunningDiagnosis(config))
    displays = list(_displays(view, folder, watched))
    with _noting(watched, context):
        async with _shown(displays, watched, ends=view is not None):
            yield


@contextmanager
def _noting(watched: Watched, context: Context) -> Iterator[None]:
    """Pass the metrics and the samples of the run on within the body."""
    notes = (watched.progress, watched.diagnosis)
    for each in notes:
        context.metrics.sinks.append(each.note)
        context.sample_sinks.append(each.note_samples)
    try:
        yield
    finally:
        for each in notes:
            with suppress(ValueError):  # it raised, and was removed
                context.metrics.sinks.remove(each.note)
            context.sample_sinks.remove(each.note_samples)


@asynccontextmanager
async def _shown(displays: list[Display], watched: Watched, *, ends: bool) -> AsyncIterator[None]:
    """Show the run within the body, and at last its end if `ends`."""
    try:
        for display in displays:
            with anyio.move_on_after(OUTPUT_TIMEOUT_S, shield=True), _logging_failures():
                await display.open()
        with unwrap_single():
            async with anyio.create_task_group() as tasks:
                for display in displays:
                    tasks.start_soon(_refresh, display)
                yield
                tasks.cancel_scope.cancel()
    finally:
        with anyio.move_on_after(OUTPUT_TIMEOUT_S, shield=True):
            for display in displays:
                with _logging_failures():
                    await display.close()
            if ends:
                await _print_end(watched)


async def _refresh(display: Display) -> None:
    with _logging_failures():
        await display.refresh()


@contextmanager
def _logging_failures() -> Iterator[None]:
    try:
        yield
    except Exception:
        log.exception("view_failed")


def _displays(view: View | None, folder: Path | None, watched: Watched) -> Iterator[Display]:
    if folder is not None:
        from .published import PublishedView  # noqa: PLC0415 (as above)

        yield PublishedView(watched, folder)
    if view is not None:
        yield _display(view, watched)


def _display(view: View, watched: Watched) -> Display:
    if view == "live" or (view == "auto" and _can_move_the_cursor()):
        from .live import LiveTable  # noqa: PLC0415 (as above)

        return LiveTable(watched)
    from .lines import Lines  # noqa: PLC0415 (as above)

    return Lines(watched)


def _can_move_the_cursor() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") not in {"dumb", "unknown"}


async def _print_end(watched: Watched) -> None:
    """Print the end of the run; that of a stopped one is printed with the way to resume it."""
    from .snapshot import duration  # noqa: PLC0415 (as above)

    report = watched.report()
    if report is not None and not report.stop_reason.startswith("stopped by"):
        await in_thread(print_line, f"ended: {report.stop_reason}, after {duration(report.seconds)}")
