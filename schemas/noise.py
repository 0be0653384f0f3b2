"""The rounding error of rewards: two rewards that differ by no more are equal.

Rewards travel as float32, and a sum of parts that should be the same comes out an ulp or two apart: the error is a
share of the summands, not of the sum. It belongs to one sequence. A bound that decided a reward (a clip, a fallback)
replaced the sum, so that what it removed left no error; and a part outside the sum, such as a diagnostic, adds no
error.

Axes: S sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import InvalidRecord

Floats: TypeAlias = NDArray[np.float64]

NOISE = 4 * float(np.finfo(np.float32).eps)
"""The share of the summands by which rounding may have moved a sum of float32: a few ulps."""

WHOLE = "score"
"""The part whose presence means that the reward is the sum of all parts; without it they were added to the one
before."""

BOUNDS = ("fallback", "clip")
"""The parts that are not 0 where a bound decided the reward."""


def rounding(values: NDArray[Any]) -> Floats:
    """Return [S] the error that rounding to float32 may have left in each of `values` [S]."""
    return np.asarray(NOISE * np.abs(values, dtype=np.float64))


def noise_of_sum(
    rewards: NDArray[Any], before: NDArray[Any], noise: Floats, parts: Mapping[str, NDArray[Any]]
) -> Floats:
    """Return [S] the noise of `rewards` that were `before`, with noise `noise`, after `parts` ([S] each) were added.

    1. Where a bound decided, and where the parts do not add up to the rewards: that of the reward itself.
    2. Where the reward did not change: the noise that it had, whatever else was recorded beside it.
    3. Elsewhere: the share of all summands.
    """
    own, whole = rounding(rewards), WHOLE in parts
    added = np.array([*parts.values()], np.float64).reshape(len(parts), len(rewards))
    summed = NOISE * np.abs(added).sum(axis=0) + (0.0 if whole else noise)
    apart = np.abs(added.sum(axis=0) + (0.0 if whole else before) - rewards)
    bounded = np.any([parts[name] != 0 for name in BOUNDS if name in parts], axis=0)
    found = np.where(bounded | (apart > summed), own, summed)
    return np.maximum(own, found if whole else np.where(rewards == before, noise, found))


LARGE = 0.5 / NOISE
"""From this magnitude on, 2²⁰, whole numbers that differ by 1 count as equal."""

HUGE = 2.0**53
"""From this magnitude on float64 has no fractions either, and differences within the noise are noise."""

LOST = 1e-3
"""The share of the range of a group's rewards by which rounding may move one of them."""


def check_distinct(rewards: NDArray[Any]) -> None:
    """Check that the differences between `rewards` [S] of one group survive as float32: they make the advantages.

    1. Below `LARGE`, differences that rounding removes are rounding themselves.
    2. So are those of a few last places of a float64, and from `HUGE` on those within the noise: the rewards are equal.
    3. Elsewhere a reward may move by `LOST` of the range, and the range of whole numbers has to be above the noise.

    Raises:
        InvalidRecord: rewards move, or differ and count as equal.
    """
    if rewards.dtype == np.float32:
        return
    exact = np.asarray(rewards, np.float64)
    least, largest = float(exact.min()), float(exact.max())
    magnitude, spread = max(-least, largest), largest - least
    noise = 2 * NOISE * magnitude
    equal = noise if magnitude >= HUGE else 8 * np.finfo(np.float64).eps * magnitude
    if not LARGE <= magnitude <= float(np.finfo(np.float32).max) or spread <= equal:
        return
    moved = np.abs(exact.astype(np.float32) - exact).max()
    are_whole = bool((exact == np.rint(exact)).all())
    if moved > LOST * spread or (are_whole and spread <= noise):
        raise InvalidRecord(
            f"rewards: expected differences that float32 can hold, got rewards from {least!r} to {largest!r} in one "
            f"group; subtract a constant from them, or scale the summand that varies"
        )
