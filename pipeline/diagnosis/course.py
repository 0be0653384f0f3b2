"""The courses of the metrics that rules read: of a run of any length, in a fixed amount of memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean, median, pvariance

WINDOW = 20
"""Steps at the beginning, and at the end, that rules look at: enough for a mean, and few enough to follow a change."""

EVALUATIONS = 64
"""Evaluations that are kept, the last ones."""

MOST_METRICS = 1024
"""Metrics that are kept: the names of evaluated sets come from a file."""

CERTAIN = 3.0
"""Standard errors from which a difference of two means is no chance, of halves of ten steps and fewer too."""


@dataclass(slots=True)
class Course:
    """The course of one metric: its first and its last values, by step, and its extremes."""

    first: list[tuple[int, float]] = field(default_factory=list)
    """The first WINDOW."""
    last: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=2 * WINDOW))
    """The last two WINDOWs."""
    count: int = 0
    lowest: float = math.inf
    highest: float = -math.inf

    def add(self, step: int, value: float) -> None:
        """Add the value of a step."""
        if len(self.first) < WINDOW:
            self.first.append((step, value))
        self.last.append((step, value))
        self.count += 1
        self.lowest, self.highest = min(self.lowest, value), max(self.highest, value)

    def recent(self, count: int = WINDOW) -> list[float]:
        """Return the last `count` values, or as many as there are."""
        return [value for _, value in islice(self.last, max(0, len(self.last) - count), None)]

    def mean(self, count: int = WINDOW) -> float:
        """Return the mean of the last `count` values; NaN without any."""
        values = self.recent(count)
        return fmean(values) if values else math.nan

    def middle(self, count: int) -> float:
        """Return the median of the last `count` values, which one odd batch does not move; NaN without any."""
        values = self.recent(count)
        return median(values) if values else math.nan

    def steps(self, count: int = WINDOW) -> str:
        """Return the last `count` steps as text: `steps 11 to 30`."""
        known = [step for step, _ in self.last][-count:]
        return f"steps {known[0]} to {known[-1]}" if len(known) > 1 else f"step {known[0]}"

    def began_with(self) -> float:
        """Return the mean of the first values; NaN without any."""
        return fmean(value for _, value in self.first) if self.first else math.nan

    def rises(self) -> bool:
        """Return whether the second half of the last values is higher than the first, by more than chance."""
        values = self.recent(2 * WINDOW)
        half = len(values) // 2
        if half < 2:  # noqa: PLR2004 (a variance needs two)
            return False
        early, late = values[:half], values[-half:]
        error = math.sqrt((pvariance(early) + pvariance(late)) / (half - 1))
        return fmean(late) - fmean(early) > max(CERTAIN * error, 0.0)


@dataclass(slots=True)
class Evaluated:
    """One evaluation, and the reward of training at its time."""

    step: int
    """The step whose weights were evaluated."""
    value: float
    reward: float
    """The mean reward of the last WINDOW steps."""


@dataclass(slots=True)
class Courses:
    """The courses of some metrics.

    Args:
        names: of the metrics; others are not kept.
    """

    names: frozenset[str]
    step: int = 0
    """The last step."""
    by_name: dict[str, Course] = field(default_factory=dict)
    evaluations: dict[str, deque[Evaluated]] = field(default_factory=dict)
    """Those of each metric of an evaluation that rules read."""

    def add(self, metrics: Mapping[str, float | None], step: int) -> None:
        """Add the metrics of a step; None is a number that is not finite, as JSON has it, and is left out."""
        self.step = max(self.step, step)
        for name in self.names & metrics.keys():
            value = metrics[name]
            if value is not None and math.isfinite(value):
                self.by_name.setdefault(name, Course()).add(step, value)
        if (evaluated := metrics.get("eval/step")) is not None and math.isfinite(evaluated):
            self._evaluated(metrics, int(evaluated))

    def _evaluated(self, metrics: Mapping[str, float | None], step: int) -> None:
        reward = self.of("reward").mean()
        for name, value in metrics.items():
            if not is_evaluation(name) or value is None or not math.isfinite(value):
                continue
            if name in self.evaluations or len(self.evaluations) < MOST_METRICS:
                kept = self.evaluations.setdefault(name, deque(maxlen=EVALUATIONS))
                kept.append(Evaluated(step, value, reward))

    def of(self, name: str) -> Course:
        """Return the course of a metric; an empty one of a metric that is not emitted."""
        return self.by_name.get(name) or Course()

    def emitted(self, names: Iterable[str]) -> bool:
        """Return whether all of these were emitted."""
        return all(name in self.by_name or (name == "eval/" and bool(self.evaluations)) for name in names)


def is_evaluation(name: str) -> bool:
    """Return whether a metric is the result of an evaluation: `eval/<set>/mean@n` or `eval/<set>/reward`."""
    last = name.rpartition("/")[2]
    return name.startswith("eval/") and (last == "reward" or last.startswith("mean@"))
