"""A curve of bounded size, however many values it is made of."""

from __future__ import annotations

from dataclasses import dataclass, field

MOST_POINTS = 2_000
"""Points of a curve. One of more values is drawn as means of 2, 4, 8, … successive values."""

LARGEST = 1e100
"""The largest value that is drawn: sums of them are finite, and charts have axes for them."""


@dataclass(slots=True)
class _Bucket:
    """Successive values of a curve."""

    line: int
    """The line of the last of them."""
    count: int
    total: float
    low: float
    high: float

    def add(self, line: int, value: float) -> None:
        self.line = line
        self.count += 1
        self.total += value
        self.low = min(self.low, value)
        self.high = max(self.high, value)

    def join(self, later: _Bucket) -> _Bucket:
        return _Bucket(
            later.line,
            self.count + later.count,
            self.total + later.total,
            min(self.low, later.low),
            max(self.high, later.high),
        )


@dataclass(slots=True)
class Curve:
    """The values of one metric by the line that has them.

    >>> curve = Curve()
    >>> for line in range(5_000):
    ...     curve.add(line, float(line % 4))
    >>> len(curve.means()), curve.means()[:2], curve.lows()[:2], curve.highs()[:2]
    (1250, [1.5, 1.5], [0.0, 0.0], [3.0, 3.0])
    """

    width: int = 1
    """Values in each point; the last one may have fewer."""
    not_finite: int = 0
    """Values that are NaN, infinite, or beyond `LARGEST`: they are in no point."""
    _buckets: list[_Bucket] = field(default_factory=list)

    def add(self, line: int, value: float) -> None:
        """Add the value of a line."""
        if not abs(value) <= LARGEST:
            self.not_finite += 1
            return
        buckets = self._buckets
        if buckets and buckets[-1].count < self.width:
            buckets[-1].add(line, value)
            return
        if len(buckets) == MOST_POINTS:
            self._buckets = [one.join(other) for one, other in zip(buckets[::2], buckets[1::2], strict=True)]
            self.width *= 2
            self._buckets.append(_Bucket(line, 1, value, value, value))
            return
        buckets.append(_Bucket(line, 1, value, value, value))

    def total(self) -> float:
        """Return the sum of all values."""
        return rounded(sum(bucket.total for bucket in self._buckets))

    def lines(self) -> list[int]:
        """Return the line of the last value of each point."""
        return [bucket.line for bucket in self._buckets]

    def means(self) -> list[float]:
        """Return the mean of each point."""
        return [rounded(bucket.total / bucket.count) for bucket in self._buckets]

    def lows(self) -> list[float]:
        """Return the lowest value of each point."""
        return [rounded(bucket.low) for bucket in self._buckets]

    def highs(self) -> list[float]:
        """Return the highest value of each point."""
        return [rounded(bucket.high) for bucket in self._buckets]


DIGITS = 7
"""Significant digits of a number on the page."""


def rounded(value: float) -> float:
    """Return a number with as many digits as a picture shows."""
    return float(f"{value:.{DIGITS}g}")
