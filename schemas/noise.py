"""How far rounding may have moved a reward: two rewards that differ by no more are equal.

Rewards travel as float32, and a sum of parts that should be the same comes out an ulp or two apart: the error is a
share of what was added up, not of the sum. It belongs to one sequence. A bound that decided a reward (a clip, a
fallback) replaced the sum, so that what was cut off left no error behind; and a part that is not in the sum, such as a
diagnostic, has none.

Axes: S sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["NOISE", "noise_of_sum", "rounding"]

Floats: TypeAlias = NDArray[np.float64]

NOISE = 4 * float(np.finfo(np.float32).eps)
"""The share of what was added up by which rounding may have moved a sum of float32: a few ulps of it."""

WHOLE = "score"
"""The part with which the others are all that a reward is the sum of; without it they were added to the one before."""

BOUNDS = ("fallback", "clip")
"""The parts that are not 0 where a bound decided the reward."""


def rounding(values: NDArray[Any]) -> Floats:
    """[S] how far rounding to float32 may have moved each of `values` [S]."""
    return np.asarray(NOISE * np.abs(values, dtype=np.float64))


def noise_of_sum(
    rewards: NDArray[Any], before: NDArray[Any], noise: Floats, parts: Mapping[str, NDArray[Any]]
) -> Floats:
    """[S] the noise of `rewards` that were `before`, with the noise `noise`, after `parts` ([S] each) came with them.

    1. Where a bound decided, and where the parts do not add up to the rewards: that of the reward itself.
    2. Where the reward stayed as it was: the noise that it had, whatever else was noted beside it.
    3. Elsewhere: the share of all that was added up.
    """
    own, whole = rounding(rewards), WHOLE in parts
    added = np.array([*parts.values()], np.float64).reshape(len(parts), len(rewards))
    summed = NOISE * np.abs(added).sum(axis=0) + (0.0 if whole else noise)
    apart = np.abs(added.sum(axis=0) + (0.0 if whole else before) - rewards)
    bounded = np.any([parts[name] != 0 for name in BOUNDS if name in parts], axis=0)
    found = np.where(bounded | (apart > summed), own, summed)
    return np.maximum(own, found if whole else np.where(rewards == before, noise, found))
