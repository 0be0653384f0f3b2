"""The evaluations of a run: every worker evaluates a part of the prompts, and the parts of one step are merged exactly.

A part is held back until the parts of all workers are here, so that no metric is ever the mean of a part. Means are
Σ/Σ over all prompts. A part that is not whole yet is shown as progress, and not merged. An evaluation whose parts do
not all arrive, because a worker died or has skipped a step, is dropped when a later one is complete. One event loop
uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated

import msgspec
from msgspec import Meta

from ..._schemas.bounds import MOST_ENTRIES, MOST_NAMES, Count, Measure, Name, SmallCount
from ..util.waiting import Waiters
from .sample import Sample

STEP = "eval/step"
"""The metric with the step that was evaluated."""


class EvaluationPart(msgspec.Struct, frozen=True, array_like=True):
    """The result of one worker in the evaluation of one step."""

    step: Count
    """The optimizer step that is evaluated."""
    worker: SmallCount
    workers: SmallCount
    """The number of workers that share the prompts."""
    means: Annotated[dict[Name, tuple[Measure, Measure]], Meta(max_length=MOST_NAMES)] = {}
    """Σ value, and the number of values, by the name of the metric."""
    totals: Annotated[dict[Name, Measure], Meta(max_length=MOST_NAMES)] = {}
    failed: Annotated[tuple[Name, ...], Meta(max_length=MOST_NAMES)] = ()
    """The beginnings of the names of metrics that are not shown, because this worker could not finish them."""
    prompts: Count = 0
    """Prompts of this worker's share, over all sets."""
    left: Count = 0
    """Those of them that it has still to complete; 0 once the part is whole."""
    samples: Annotated[tuple[Sample, ...], Meta(max_length=MOST_ENTRIES)] = ()
    """The best and the worst of its completions."""


class Evaluations:
    """Merges the parts of evaluations."""

    def __init__(self) -> None:
        self._parts: dict[int, dict[int, EvaluationPart]] = {}
        """The parts of each step that is not complete, by worker."""
        self._newest: dict[int, EvaluationPart] = {}
        """The newest part of each worker, whole or not."""
        self._awaited = -1
        """The last step that was waited for."""
        self.last: tuple[EvaluationPart, ...] = ()
        """The parts of the last complete evaluation, by worker."""
        self.found: dict[str, float] = {}
        """The metrics of the last complete evaluation, until `take`."""
        self.samples: list[Sample] = []
        """Its samples, until `take_samples`."""
        self.completed: int = -1
        """The last step whose evaluation is complete, or belongs to an earlier run; −1 before the first."""
        self._changed = Waiters()
        self._open = False

    def __repr__(self) -> str:
        return f"<Evaluations: {self.completed} complete, parts of {sorted(self._parts)}>"

    @contextmanager
    def expected(self, first: int = 0) -> Iterator[None]:
        """Expect parts within the body, while the source of a run runs; afterwards `finished` waits no longer.

        Args:
            first: the optimizer step that the run begins with. Evaluations of earlier ones belong to the run before.
        """
        self._parts, self._newest, self.last, self.found, self.samples = {}, {}, (), {}, []
        self.completed, self._open = first - 1, True
        try:
            yield
        finally:
            self._open = False
            self._changed.wake_all()

    def add(self, part: EvaluationPart) -> None:
        """Add the part of a worker. A worker that was restarted may repeat one: it counts once."""
        if part.step <= self.completed:
            return
        self._newest[part.worker] = part
        if part.left:
            return
        parts = self._parts.setdefault(part.step, {})
        parts[part.worker] = part
        if len(parts) == part.workers:
            self.last = tuple(parts[worker] for worker in sorted(parts))
            self.found = merged(self.last) | {STEP: float(part.step)}
            self.samples = [sample for each in self.last for sample in each.samples]
            self._parts = {step: later for step, later in self._parts.items() if step > part.step}
            self.completed = part.step
            self._changed.wake_all()

    def take(self) -> dict[str, float]:
        """Return the metrics of the last complete evaluation, once; empty without a new one."""
        taken, self.found = self.found, {}
        return taken

    def take_samples(self) -> list[Sample]:
        """Return the best and the worst samples of its workers, once; to be called right after `take`."""
        taken, self.samples = self.samples, []
        return taken

    async def finished(self, step: int) -> None:
        """Wait until the evaluation of `step` is complete, or the source has ended."""
        self._awaited = step
        while self._open and self.completed < step:
            await self._changed.wait()

    @property
    def awaited(self) -> str:
        """Return the evaluation that a task waits for: `evaluation of step 20, 12 of 40 prompts`; empty without any."""
        return self._shown(self._awaited) if self._changed else ""

    @property
    def going_on(self) -> str:
        """Return the newest evaluation that workers are at, in the same form; empty without any."""
        step = max((part.step for part in self._newest.values()), default=-1)
        return self._shown(step) if step > self.completed else ""

    def _shown(self, step: int) -> str:
        parts = [part for part in self._newest.values() if part.step == step]
        prompts, left = sum(part.prompts for part in parts), sum(part.left for part in parts)
        return f"evaluation of step {step}" + (f", {prompts - left} of {prompts} prompts" if prompts else "")


def merged(parts: Iterable[EvaluationPart]) -> dict[str, float]:
    """Return the metrics of the parts of one evaluation; no mean that a worker has failed to finish.

    >>> merged([EvaluationPart(20, 0, 2, {"reward": (3.0, 4.0)}), EvaluationPart(20, 1, 2, {"reward": (0.0, 2.0)})])
    {'reward': 0.5}
    """
    means: dict[str, tuple[float, float]] = {}
    totals: dict[str, float] = {}
    failed: tuple[str, ...] = ()
    for part in parts:
        failed += part.failed
        for name, (value, count) in part.means.items():
            before = means.get(name, (0.0, 0.0))
            means[name] = (before[0] + value, before[1] + count)
        for name, amount in part.totals.items():
            totals[name] = totals.get(name, 0.0) + amount
    finished = {name: sums for name, sums in means.items() if not name.startswith(failed)}
    return {name: value / count for name, (value, count) in finished.items() if count} | totals
