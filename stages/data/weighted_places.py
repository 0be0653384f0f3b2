"""`WeightedPlaces`: the numbers of prompts, shared among several sources of them by weight.

A number belongs to a source by its place in a block. There every source has a fixed number of places, spread evenly; so
any stretch of numbers has each source in about its share. Within a source, prompts are counted on their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Self

import numpy as np

from ..._pipeline.errors import InvalidConfig
from ..._schemas.numbers import finite_number

MOST_PLACES = 1000
"""Places of a block, at most; weights are rounded to it."""

EXACT = 1e-9
"""Difference from a whole number that is due to rounding."""


class WeightedPlaces:
    """The places of a block, for sources with these numbers of places.

    >>> [WeightedPlaces([3, 1]).at(number) for number in range(5)]
    [(0, 0), (0, 1), (1, 0), (0, 2), (0, 3)]
    """

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts
        """The places of each source in a block."""
        middles = [((index + 0.5) / count, which) for which, count in enumerate(counts) for index in range(count)]
        self._block = [which for _, which in sorted(middles)]
        """The source of each place."""
        taken = [itertools.count() for _ in counts]
        self._before = [next(taken[which]) for which in self._block]
        """The places of the same source before it in the block."""

    @classmethod
    def of(cls, field: str, weights: Mapping[str, float]) -> Self:
        """Return the places of sources by name, with the share of each in any unit.

        Raises:
            InvalidConfig: there are none, or a weight is not above 0 or less than a thousandth of all; the message has
                `field`.
        """
        if not weights:
            raise InvalidConfig(f"{field}: expected at least one, got none")
        for name, weight in weights.items():
            finite_number(f"{field}[{name!r}]", weight)
        shares = np.array(list(weights.values()), np.float64) / sum(weights.values())
        exact = (most for most in range(1, MOST_PLACES) if np.abs(shares * most - np.rint(shares * most)).max() < EXACT)
        ends = np.floor(np.cumsum(shares) * next(exact, MOST_PLACES) + 0.5)
        counts = [int(places) for places in np.diff(ends, prepend=0)]
        if small := [name for name, places in zip(weights, counts, strict=True) if not places]:
            raise InvalidConfig(f"{field}: expected at least a thousandth of all, got less for {small[0]!r}")
        return cls(counts)

    def at(self, number: int) -> tuple[int, int]:
        """Return the source of a number, and the number of the prompt within it."""
        block, place = divmod(number, len(self._block))
        which = self._block[place]
        return which, block * self.counts[which] + self._before[place]
