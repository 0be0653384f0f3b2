"""The curves of a run, from its `metrics.jsonl`: by optimizer step, by trained tokens, and by hours."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import msgspec

from ..accounting.evaluations import STEP
from ..accounting.ledger_metrics import BEGUN, BY_REASON
from ..trackers.jsonl import METRICS
from ..trackers.written_lines import LAST_STEP, Damage, Metrics, decoded_lines, metrics_of
from ..util.regular_file import open_regular
from .curve import LARGEST, Curve, rounded

MOST_CURVES = 1_000
"""Metrics of a run that are drawn: the first ones."""

LONGEST_NAME = 200
"""Characters of the name of a metric that is drawn."""

HOUR_S = 3600

TOKENS, SECONDS = "perf/total_num_tokens", "perf/time_per_step"
"""The metrics whose sums are the trained tokens and the seconds of a run."""

EVALUATIONS = "eval/"
"""The beginning of the metrics of evaluations, which are emitted with a later step."""

COUNTS = f"{BY_REASON}/"
"""The beginning of counts that a line has where they are not 0."""

_AxisKey: TypeAlias = tuple[tuple[int, ...], bool]
"""The lines of the points of some curves, and whether these are of evaluations."""


class Axis(msgspec.Struct, frozen=True):
    """The places of points on the three horizontal axes."""

    step: list[int]
    tokens: list[float]
    hours: list[float]


class DrawnCurve(msgspec.Struct, frozen=True):
    """A curve as the page has it."""

    axis: int
    """The number of its axis among those of the run."""
    mean: list[float]
    low: list[float] | None
    """The lowest value of each point; None where a point is one value."""
    high: list[float] | None
    total: float
    """The sum of all values of the run."""
    not_finite: int


class Curves(msgspec.Struct, frozen=True):
    """All curves of a run."""

    lines: int
    last_step: int
    axes: list[Axis]
    drawn: dict[str, DrawnCurve]
    left_out: int
    """Metrics that are not drawn, because there are too many or their names are too long."""
    values_in_a_point: int
    """The most successive values that a point is the mean of."""


@dataclass(slots=True)
class _Places:
    """The places of all lines on the three axes."""

    step: array[int] = field(default_factory=lambda: array("q"))
    tokens: array[float] = field(default_factory=lambda: array("d", [0.0]))
    seconds: array[float] = field(default_factory=lambda: array("d", [0.0]))

    def add(self, step: int, tokens: float, seconds: float) -> None:
        self.step.append(step)
        self.tokens.append(self.tokens[-1] + tokens)
        self.seconds.append(self.seconds[-1] + seconds)

    def at(self, lines: list[int]) -> Axis:
        return Axis(
            step=[self.step[line] for line in lines],
            tokens=[rounded(self.tokens[line + 1]) for line in lines],
            hours=[rounded(self.seconds[line + 1] / HOUR_S) for line in lines],
        )


@dataclass(slots=True)
class _Reading:
    """The curves of the lines that have been read."""

    places: _Places = field(default_factory=_Places)
    curves: dict[str, Curve] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)

    def add(self, step: int, line: Metrics) -> None:
        line_number = len(self.places.step)
        self.places.add(step, _amount(line.get(TOKENS)), _amount(line.get(SECONDS)))
        for name, value in line.items():
            if (curve := self._curve(name)) is not None:
                curve.add(line_number, math.nan if value is None else value)
        if BEGUN in line:
            for name, curve in self.curves.items():
                if name.startswith(COUNTS) and name not in line:
                    curve.add(line_number, 0.0)

    def _curve(self, name: str) -> Curve | None:
        curve = self.curves.get(name)
        if curve is None and len(self.curves) < MOST_CURVES and len(name) <= LONGEST_NAME:
            curve = self.curves[name] = Curve()
        elif curve is None and len(self.left_out) < MOST_CURVES:
            self.left_out.add(name)
        return curve

    def finish(self) -> Curves:
        axes: dict[_AxisKey, int] = {}
        drawn = dict(self._drawn(axes))
        return Curves(
            lines=len(self.places.step),
            last_step=max(self.places.step, default=0),
            axes=[self._axis(key) for key in axes],
            drawn=drawn,
            left_out=len(self.left_out),
            values_in_a_point=max((curve.width for curve in self.curves.values()), default=1),
        )

    def _drawn(self, axes: dict[_AxisKey, int]) -> Iterator[tuple[str, DrawnCurve]]:
        """Yield the curves; each adds its key to `axes`, which curves of the same lines share."""
        for name, curve in self.curves.items():
            of_several, key = curve.width > 1, (tuple(curve.lines()), name.startswith(EVALUATIONS))
            yield (
                name,
                DrawnCurve(
                    axis=axes.setdefault(key, len(axes)),
                    mean=curve.means(),
                    low=curve.lows() if of_several else None,
                    high=curve.highs() if of_several else None,
                    total=curve.total(),
                    not_finite=curve.not_finite,
                ),
            )

    def _axis(self, key: _AxisKey) -> Axis:
        """Return an axis; the steps of an evaluation are those whose weights were evaluated, where they are known."""
        lines, of_evaluations = [*key[0]], key[1]
        axis, evaluated = self.places.at(lines), self.curves.get(STEP)
        if not of_evaluations or evaluated is None or evaluated.lines() != lines:
            return axis
        steps = [round(step) for step in evaluated.means()]
        if not all(0 <= step <= LAST_STEP for step in steps):
            return axis
        return Axis(step=steps, tokens=axis.tokens, hours=axis.hours)


def read_curves(folder: Path, damage: Damage) -> Curves:
    """Return the curves of the run in `folder`; none where it has no metrics. Blocks.

    Raises:
        OSError: the file cannot be read.
    """
    reading = _Reading()
    with suppress(FileNotFoundError), open_regular(folder / METRICS) as file:
        for step, line in decoded_lines(file, metrics_of, damage):
            reading.add(step, line)
    return reading.finish()


def _amount(value: float | None) -> float:
    """Return what a line adds to a sum; nothing that would make it fall or end it."""
    return value if value is not None and 0 < value <= LARGEST else 0.0
