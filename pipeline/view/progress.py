"""The progress of a run, from the metrics of its steps: a sink of metrics. Knows no terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import anyio
import msgspec

from ..accounting.sample import Sample
from .trend import Trend

SHOWN = (
    "reward",
    "rollout/reward",
    "accuracy",
    "eval/",
    "response_length/mean",
    "staleness/mean",
    "loss",
    "grad_norm",
)
"""Metrics that the view shows where they are emitted, in this order; a name with a slash at its end is a prefix."""

RECENT = 10
"""Optimizer steps that speeds are averaged over."""


RATES = {"tokens/s": "perf/total_num_tokens", "trajectories/s": "batch/trajectories"}
"""Speeds, and the metrics whose sums they are."""


SHOWN_CHARACTERS = 400
"""Characters of the end of a prompt and of the beginning of a completion that the view shows at most."""


class ProgressState(NamedTuple):
    """The progress of a run at one moment."""

    step: int
    """The last optimizer step; those before a resumption count."""
    max_steps: int | None
    """The last step of the run; None if unknown."""
    seconds: float
    """Seconds since the run began."""
    left_s: float | None
    """Seconds until the last step at the present speed; None if unknown."""
    rates: dict[str, float]
    """The speeds that are known, by unit."""
    metrics: tuple[tuple[str, float | None, str], ...]
    """The name, the last value and the course of each metric that is shown."""
    samples: tuple[Sample, ...] = ()
    """The best and the worst of the last step with samples, then of the last evaluation, with shortened text."""


class Progress:
    """The steps of a run so far: their number, their speed, and the course of some metrics.

    Args:
        max_steps: the last step of the run; None if unknown.
    """

    def __init__(self, max_steps: int | None = None) -> None:
        self.max_steps = max_steps
        self.step = 0
        """The last optimizer step that emitted metrics; those before a resumption count."""
        self._trends: dict[str, Trend] = {}
        self._recent: deque[dict[str, float]] = deque(maxlen=RECENT)
        """Metrics of the last steps, without the first one: it includes the start of the workers."""
        self.samples: tuple[Sample, ...] = ()
        """The best and the worst of the last step with samples, then of the last evaluation."""
        self._began = time.monotonic()
        self._stepped = anyio.Event()
        """Set at the next step."""

    def note(self, metrics: dict[str, float], step: int) -> None:
        """Add the metrics of an optimizer step; see `MetricSink`."""
        if self.step:
            self._recent.append(metrics)
        self.step = step
        for name, value in metrics.items():
            if _place(name) is not None:
                self._trends.setdefault(name, Trend()).add(value)
        self._stepped.set()
        self._stepped = anyio.Event()

    def note_samples(self, samples: Sequence[Sample], step: int) -> None:  # noqa: ARG002 (each sample has its step)
        """Keep the best and the worst of the samples of a step, and of an evaluation; see `SampleSink`."""
        new = [_shortened(sample) for sample in samples if sample.rank == 1]
        by_kind = {kind: list(some) for kept in (self.samples, new) for kind, some in groupby(kept, _is_evaluated)}
        self.samples = tuple(sample for kind in sorted(by_kind) for sample in by_kind[kind])

    async def step_after(self, step: int) -> None:
        """Wait until a step later than `step` has emitted its metrics."""
        while self.step <= step:
            await self._stepped.wait()

    def state(self, step: int = 0) -> ProgressState:
        """Return the progress now; `step` is the last step of a sink that emits no metrics."""
        return ProgressState(
            step=max(step, self.step),
            max_steps=self.max_steps,
            seconds=time.monotonic() - self._began,
            left_s=self._left_s(),
            rates={unit: rate for unit, name in RATES.items() if (rate := self._rate(name)) is not None},
            metrics=tuple((name, trend.last, trend.bars()) for name, trend in sorted(self._trends.items(), key=_order)),
            samples=self.samples,
        )

    def _left_s(self) -> float | None:
        steps = len(self._recent)
        if self.max_steps is None or not steps:
            return None
        return max(0, self.max_steps - self.step) * self._sum("perf/time_per_step") / steps

    def _rate(self, name: str) -> float | None:
        """Return the sum of metric `name` for each second of the last steps; None where it is not emitted."""
        seconds = self._sum("perf/time_per_step")
        if not seconds or not any(name in metrics for metrics in self._recent):
            return None
        return self._sum(name) / seconds

    def _sum(self, name: str) -> float:
        return sum(metrics.get(name, 0.0) for metrics in self._recent)


def _is_evaluated(sample: Sample) -> bool:
    return sample.evaluated is not None


def _shortened(sample: Sample) -> Sample:
    return msgspec.structs.replace(
        sample,
        prompt=sample.prompt[-SHOWN_CHARACTERS:],
        completion=sample.completion[:SHOWN_CHARACTERS],
        answer=sample.answer and sample.answer[-SHOWN_CHARACTERS:],
        tokens=None,
        branches=[],
    )


def _order(each: tuple[str, Trend]) -> tuple[int, str]:
    return _place(each[0]) or 0, each[0]


@lru_cache(maxsize=1024)
def _place(name: str) -> int | None:
    """Return the place of metric `name` in the view; None where it is not shown."""
    for place, shown in enumerate(SHOWN):
        if name == shown or (shown.endswith("/") and name.startswith(shown)):
            return place
    return None
