"""The order of rows: a function of seed, epoch and place; and the choice of rows for evaluation.

Both are computed from the bits of PCG64 that numpy keeps the same in every version, not by numpy's own shuffling (it
may change): a run that is resumed after an update of numpy has the same order. Knows no row.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, TypeAlias

import numpy as np
from numpy.random import PCG64, SeedSequence
from numpy.typing import NDArray

Split: TypeAlias = Literal["train", "evaluation"]

SPLIT_SEED = 20_261_123
"""One for all runs, so that no row of evaluation is trained under another seed."""

EPOCHS_KEPT = 2
"""At the border of two epochs, prompts of both are begun in turn."""


def split_rows(count: int, split: Split, evaluation: float) -> NDArray[np.int64]:
    """Return the rows of a split, ascending.

    The rows are cut into stretches of equal length, and from each stretch one row is drawn for evaluation.

    Args:
        count: number of rows.
        split: the part to return. The two are disjoint, and have every row together.
        evaluation: below 1 the share of the rows that are for evaluation: rows that are appended move no other, because
            the stretches stay. From 1 on their number, exactly.
    """
    if evaluation < 1:
        edges = np.ceil(np.arange(int(count * evaluation) + 2) / evaluation).astype(np.int64)
    else:
        number = min(int(evaluation), count)
        edges = np.arange(number + 1) * count // max(number, 1)
    drawn = edges[:-1] + (_random(len(edges) - 1, SPLIT_SEED) * np.diff(edges)).astype(np.int64)
    chosen = np.zeros(count, np.bool_)
    chosen[drawn[drawn < count]] = True
    return np.flatnonzero(chosen if split == "evaluation" else ~chosen)


class Shuffled:
    """A permutation of `count` places for each epoch.

    >>> order = Shuffled(3, seed=7)
    >>> sorted(order.place(number) for number in (3, 4, 5))
    [0, 1, 2]
    """

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        self._seed = seed
        self._permutation = lru_cache(EPOCHS_KEPT)(self._permuted)

    def place(self, number: int) -> int:
        """Return the place of `number`; numbers go on from epoch to epoch."""
        epoch, step = divmod(number, self._count)
        return int(self._permutation(epoch)[step])

    def _permuted(self, epoch: int) -> NDArray[np.int64]:
        return np.argsort(_random(self._count, self._seed, epoch), kind="stable")


def _random(count: int, *seed: int) -> NDArray[np.float64]:
    """Return [count] random numbers from 0 to 1, exclusive; those of a larger count begin with the same ones."""
    bits = np.asarray(PCG64(SeedSequence(seed)).random_raw(count), np.uint64)
    return (bits >> np.uint64(11)) / 2.0**53
