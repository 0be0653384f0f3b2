"""A run as plain lines on stderr: for logs, and where there is no terminal."""

from __future__ import annotations

from collections.abc import Iterable

import anyio

from ..accounting.sample import Sample
from ..diagnosis.finding import RunFinding
from ..graph.statistics import PipelineStatistics
from ..util.blocking import in_thread
from ..util.printing import print_line
from .sample_text import heading, one_line, place
from .snapshot import Snapshot, Watched, number

EVERY_S = 5.0
"""Seconds between two lines: a run of a day writes at most 17,280."""

START_S = 1.0
"""Seconds from the beginning of a run to its first line, with the wait of every stage."""

QUIET_S = 30.0
"""Seconds without an optimizer step, or a change of the waits of stages before the first one, between two lines."""

EVALUATION = " for evaluation of step "
"""The beginning of a wait for an evaluation."""


class Lines:
    """Prints a line after an optimizer step, or after a time without one; see `Display`."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._printed = 0
        """The step of the last line."""
        self._waits = ""
        """The waits of stages in the last line."""
        self._samples: tuple[Sample, ...] = ()
        """The samples that were printed last."""
        self._found: set[str] = set()
        """The rules whose finding was printed."""

    async def open(self) -> None:
        """Print the names of the stages."""
        await in_thread(print_line, " → ".join(stage.name for stage in self._watched.statistics().stages))

    async def refresh(self) -> None:
        """Print lines until cancelled."""
        await self._step_within(START_S)
        while True:
            await self._print()
            await anyio.sleep(EVERY_S)
            await self._news()

    async def _news(self) -> None:
        """Wait for an optimizer step, for QUIET_S, or for a change of the waits of stages.

        Between two steps only the progress of an evaluation is such a change: others come with each record.
        """
        with anyio.move_on_after(QUIET_S):
            while not self._changed():
                await self._step_within(START_S)

    def _changed(self) -> bool:
        step, now = self._watched.progress.step, waits(self._watched.statistics())
        return step > self._printed or (now != self._waits and (not step or EVALUATION in now))

    async def _step_within(self, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            await self._watched.progress.step_after(self._printed)

    async def close(self) -> None:
        """Print the last step and the last samples, if they were not printed yet."""
        if self._watched.progress.step > self._printed or self._watched.progress.samples != self._samples:
            await self._print()

    async def _print(self) -> None:
        self._printed = self._watched.progress.step
        shown = self._watched.snapshot()
        self._waits = waits(shown.statistics)
        new = [sample for sample in shown.progress.samples if sample not in self._samples]
        self._samples = shown.progress.samples
        await in_thread(self._write, shown, new)

    def _write(self, shown: Snapshot, samples: Iterable[Sample]) -> None:
        """Print a state and samples, and the gravest finding where none of its rule was printed before."""
        complete = self._watched.completed(shown)
        print_lines([line(complete), *map(sample_line, samples), *self._new_finding(complete.finding)])

    def _new_finding(self, finding: RunFinding | None) -> list[str]:
        if finding is None or finding.rule in self._found:
            return []
        self._found.add(finding.rule)
        return [f"finding: {finding} (penstock diagnose)"]


def print_lines(lines: Iterable[str]) -> None:
    """Print lines to stderr."""
    for each in lines:
        print_line(each)


def line(shown: Snapshot) -> str:
    """Return the state of a run in one line."""
    metrics = [f"{name} {number(last)}" for name, last, _ in shown.progress.metrics]
    parts = [
        f"{shown.steps()}, {shown.times()}",
        ", ".join([*metrics, *shown.speeds()]),
        shown.trajectories(),
        ", ".join(shown.memory_parts()),
        waits(shown.statistics),
    ]
    return "; ".join(filter(None, parts))


def waits(statistics: PipelineStatistics) -> str:
    """Return the waits of all stages; empty without any."""
    causes = [
        f"{stage.name} for {stage.waiting_for}"
        for stage in statistics.stages
        if stage.state == "running" and stage.waiting_for
    ]
    return f"waiting: {', '.join(causes)}" if causes else ""


def sample_line(sample: Sample) -> str:
    """Return a sample in one line."""
    return (
        f"{sample.kind} of {place(sample)}: {heading(sample)}; prompt: {one_line(sample.prompt)}; completion: "
        f"{one_line(sample.completion)}{'' if sample.answer is None else f'; right answer: {one_line(sample.answer)}'}"
    )
