"""The course of one metric over a run of any length, in a fixed number of means."""

from __future__ import annotations

import math

BARS = "▁▂▃▄▅▆▇█"

WIDTH = 20
"""The fewest bars of a long run; there are less than twice as many."""


class Trend:
    """The last value of a metric, and its means over equal numbers of steps that grow with the run."""

    __slots__ = ("_added", "_means", "_share", "_sum", "last")

    def __init__(self) -> None:
        self.last = math.nan
        self._means: list[float] = []
        self._share = 1
        """Values in each mean."""
        self._sum = 0.0
        self._added = 0
        """Values in the sum; it is not yet a mean."""

    def add(self, value: float) -> None:
        """Add the value of a step; one that is not finite is shown, and is in no mean."""
        self.last = value
        if not math.isfinite(value):
            return
        self._sum += value
        self._added += 1
        if self._added == self._share:
            self._means.append(self._sum / self._share)
            self._sum, self._added = 0.0, 0
        if len(self._means) == 2 * WIDTH:
            self._means = [(a + b) / 2 for a, b in zip(self._means[::2], self._means[1::2], strict=True)]
            self._share *= 2

    def bars(self) -> str:
        """Return the means as bars, the lowest at the bottom and the highest at the top; empty for one bar."""
        if len(self._means) < 2:  # noqa: PLR2004 (a course has two points)
            return ""
        low, high = min(self._means), max(self._means)
        scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
        return "".join(BARS[round((mean - low) * scale)] for mean in self._means)
