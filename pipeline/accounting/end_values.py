"""Length, reward and age of the trajectories that were trained and dropped, and of both together: those sampled.

A filter or the bound on the lag that keeps some kind of trajectory from training shows as a difference between them. A
trajectory counts in the step in which it ended, so sampled = trained + dropped, as in the ledger; of one that was
dropped before its record was made only the count is known. A value is that of a rollout: the tokens that train, the
reward as it was when it ended, and the optimizer steps that its oldest weights were behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np

from ..._schemas import TrainBatch, TrajectoryGroup
from ..._schemas.batch import oldest_versions

Outcome: TypeAlias = Literal["trained", "dropped"]

SAMPLED = "sampled"
"""The name of all, whatever their outcome."""

MOST_VALUES = 8192
"""Values that are kept of one name between two steps; of more every second, fourth, … one is kept."""

QUANTILES = (10, 50, 90)
"""Percents of the quantiles."""


def values_of(outcome: Outcome, record: TrajectoryGroup | TrainBatch, version: int) -> dict[str, list[float]]:
    """Return the values of each rollout of `record`, by name: `trained/length`, `trained/reward`, `trained/age`.

    Args:
        outcome: of its trajectories.
        record: that was trained or dropped.
        version: of the weights when it was.
    """
    firsts = record.rollout_starts()
    if not len(firsts):
        return {}
    offsets = record.cu_seqlens if isinstance(record, TrainBatch) else record.offsets
    ages = np.maximum.reduceat(version - oldest_versions(record.policy_versions, offsets), firsts)
    return {
        f"{outcome}/length": np.add.reduceat(record.completion_lengths(), firsts).tolist(),
        f"{outcome}/reward": record.rewards[firsts].tolist(),
        f"{outcome}/age": ages.tolist(),
    }


def with_sampled(values: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Return the values of each outcome, and of all together.

    >>> with_sampled({"trained/age": [1.0], "dropped/age": [3.0]})["sampled/age"]
    [1.0, 3.0]
    """
    together: dict[str, list[float]] = {}
    for name, some in values.items():
        together.setdefault(f"{SAMPLED}/{name.partition('/')[2]}", []).extend(some)
    return {**values, **together}


def statistics_of(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return `<name>/mean`, `…/min`, `…/p10`, `…/p50`, `…/p90` and `…/max` of each; a quantile is one of the values.

    >>> statistics_of({"trained/age": [0.0, 1.0, 1.0]})["trained/age/p50"]
    1.0
    """
    found: dict[str, float] = {}
    for name, some in values.items():
        if some:
            ordered = np.sort(np.asarray(some, np.float64))
            last = len(ordered) - 1
            places = {"min": 0, **{f"p{percent}": percent * last // 100 for percent in QUANTILES}, "max": last}
            found[f"{name}/mean"] = float(ordered.mean())
            found |= {f"{name}/{key}": float(ordered[place]) for key, place in places.items()}
    return found


def thinned(values: list[float]) -> list[float]:
    """Return all of few values, and every second, fourth, … one of more than `MOST_VALUES`."""
    while len(values) > MOST_VALUES:
        values = values[::2]
    return values
