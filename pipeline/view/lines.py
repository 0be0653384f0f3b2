"""A run as plain lines on stderr: for logs, and where there is no terminal."""

from __future__ import annotations

from collections.abc import Iterable

import anyio

from ..accounting.sample import Sample
from ..util.blocking import in_thread
from ..util.printing import print_line
from .sample_text import heading, one_line
from .snapshot import Snapshot, Watched, number

EVERY_S = 5.0
"""Seconds between two lines: a run of a day writes at most 17,280."""

QUIET_S = 30.0
"""Seconds without an optimizer step after which a line says what every stage waits for."""


class Lines:
    """Prints a line after an optimizer step, or after a time without one; see `Display`."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._printed = 0
        """The step of the last line."""
        self._samples: tuple[Sample, ...] = ()
        """The samples that were printed last."""

    async def open(self) -> None:
        """Print the names of the stages."""
        await in_thread(print_line, " → ".join(stage.name for stage in self._watched.statistics().stages))

    async def refresh(self) -> None:
        """Print lines until cancelled."""
        while True:
            with anyio.move_on_after(QUIET_S):
                await self._watched.progress.step_after(self._printed)
            await self._print()
            await anyio.sleep(EVERY_S)

    async def close(self) -> None:
        """Print the last step, if it was not printed yet."""
        if self._watched.progress.step > self._printed:
            await self._print()

    async def _print(self) -> None:
        self._printed = self._watched.progress.step
        shown = self._watched.snapshot()
        new = () if shown.progress.samples is self._samples else shown.progress.samples
        self._samples = shown.progress.samples
        await in_thread(lambda: print_lines([line(shown.with_memory()), *map(sample_line, new)]))


def print_lines(lines: Iterable[str]) -> None:
    """Print lines to stderr."""
    for each in lines:
        print_line(each)


def line(shown: Snapshot) -> str:
    """Return the state of a run in one line."""
    metrics = [f"{name} {number(last)}" for name, last, _ in shown.progress.metrics]
    waits = [
        f"{stage.name} for {stage.waiting_for}"
        for stage in shown.statistics.stages
        if stage.state == "running" and stage.waiting_for
    ]
    parts = [
        f"{shown.steps()}, {shown.times()}",
        ", ".join([*metrics, *shown.speeds()]),
        shown.trajectories(),
        ", ".join(shown.memory_parts()),
        f"waiting: {', '.join(waits)}" if waits else "",
    ]
    return "; ".join(filter(None, parts))


def sample_line(sample: Sample) -> str:
    """Return a sample in one line."""
    return (
        f"{sample.kind} of step {sample.step}: {heading(sample)}; prompt: {one_line(sample.prompt)}; completion: "
        f"{one_line(sample.completion)}"
    )
