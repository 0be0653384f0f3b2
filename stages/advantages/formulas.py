"""Advantages: pure functions over packed columns, in float64, without loops over tokens or sequences.

Axes: B sequences, G groups lying one after another, `sizes` [G] sequences each. A sequence is live when it has a token
that trains; what is masked entirely has advantage 0 and enters no statistic. With R the reward of a sequence, μ and σ
(ddof = 1) mean and deviation over the live sequences of its group, n of them, of l tokens each that train:

    none                  R                         REINFORCE without a baseline
    grpo                  (R − μ) / (σ + 1e-6)      DeepSeekMath, arXiv:2402.03300
    dr_grpo               R − μ                     "Understanding R1-Zero-Like Training", arXiv:2503.20783
    rloo                  n / (n − 1) · (R − μ)     the mean of the others as baseline, arXiv:2402.14740
    opo                   R − Σ l·R / Σ l           the baseline of least variance, arXiv:2505.23585
    batch                 as grpo, μ and σ over all groups at hand
    global                as grpo, μ and σ over everything seen so far
    reinforce++           returns (see `returns`), whitened over all tokens at hand that train, arXiv:2501.03262
    reinforce++-baseline  dr_grpo, whitened over all tokens at hand that train
    gae                   see `returns`; whitened over all tokens at hand, or not

We differ from the libraries where they are wrong: a population of one, and one whose rewards differ by no more than
float32 noise, give exactly 0, where (R − 0) / (1 + ε) or noise divided by noise would come out elsewhere. What they do
stands in `presets`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "EPSILON",
    "NOISE",
    "Groups",
    "Mode",
    "RunningStatistics",
    "dr_grpo",
    "grpo",
    "opo",
    "rloo",
    "whitened",
]

Mode: TypeAlias = Literal[
    "none",
    "batch",
    "global",
    "grpo",
    "dr_grpo",
    "rloo",
    "opo",
    "reinforce++",
    "reinforce++-baseline",
    "gae",
]
"""How advantages are made."""

Floats: TypeAlias = NDArray[np.float64]
Rewards: TypeAlias = NDArray[np.float32] | Floats
Flags: TypeAlias = NDArray[np.bool_]
Counts: TypeAlias = NDArray[np.int64]

EPSILON = 1e-6
"""Added to σ before dividing, as verl and SkyRL do."""

NOISE = 4 * float(np.finfo(np.float32).eps)
"""Rewards that differ from their mean by no more than this share of the largest are equal: rewards travel as float32,
and a sum of parts that should be the same comes out an ulp or two apart."""


class Groups:
    """Rewards beside those of their group, with exact zeros where nothing can be told apart.

    Rewards that are sums say in `magnitudes` [B] how much was added up, for noise is a share of that: 0.1 + 0.2 − 0.3
    differs from 0 by an ulp of 0.3.
    """

    __slots__ = ("_filled", "_starts", "centred", "counts", "deviations", "owners")

    def __init__(
        self, rewards: Rewards, live: Flags, sizes: Counts, *, magnitudes: Floats | None = None, noise: float = NOISE
    ) -> None:
        values = np.where(live, rewards, 0.0).astype(np.float64)
        number = len(sizes)
        self._filled = sizes > 0
        self._starts = (sizes.cumsum() - sizes)[self._filled]
        self.owners = np.arange(number).repeat(sizes)
        """[B] the group of each sequence."""
        self.counts = np.bincount(self.owners, live, number)
        """[G] live sequences."""
        means = np.bincount(self.owners, values, number) / np.maximum(self.counts, 1)
        centred = np.where(live, values - means[self.owners], 0.0)
        largest = self._largest(values if magnitudes is None else np.where(live, magnitudes, 0.0))
        differ = self._largest(centred) > noise * largest
        self.centred = np.where(differ[self.owners], centred, 0.0)
        """[B] R − μ; 0 where masked, alone, or equal to all others."""
        squares = np.bincount(self.owners, self.centred**2, number)
        self.deviations = np.sqrt(squares / np.maximum(self.counts - 1, 1))
        """[G] σ; exactly 0 where all live sequences have the same reward, or there are fewer than two."""

    def _largest(self, values: Floats) -> Floats:
        """[G] the largest magnitude in each group; 0 where it has no sequences."""
        largest = np.zeros(len(self.counts))
        largest[self._filled] = np.maximum.reduceat(np.abs(values), self._starts)
        return largest


def grpo(groups: Groups, epsilon: float = EPSILON) -> Floats:
    """[B] (R − μ) / (σ + ε) within each group."""
    return groups.centred / (groups.deviations + epsilon)[groups.owners]


def dr_grpo(groups: Groups) -> Floats:
    """[B] R − μ within each group."""
    return groups.centred


def rloo(groups: Groups) -> Floats:
    """[B] R − the mean of the others in the group, which is n / (n − 1) · (R − μ)."""
    return groups.centred * (groups.counts / np.maximum(groups.counts - 1, 1))[groups.owners]


def opo(groups: Groups, lengths: Counts) -> Floats:
    """[B] R − the mean of the group in which each sequence counts by its `lengths` [B], the tokens that train."""
    number = len(groups.counts)
    weighted = np.bincount(groups.owners, groups.centred * lengths, number)
    baselines = weighted / np.maximum(np.bincount(groups.owners, lengths, number), 1)
    return np.where(lengths > 0, groups.centred - baselines[groups.owners], 0.0)


def whitened(
    values: Floats, weights: Counts | Flags, least: float, *, epsilon: float = EPSILON, epsilon_of_variance: float = 0.0
) -> Floats:
    """[M] (x − m) / (√(σ² + ε') + ε) with m and σ over all values [M], of which each counts `weights` [M] times.

    Exactly 0 where the weight is 0, and everywhere if no value is further than `least` from the mean.
    """
    number = int(weights.sum())
    kept = np.where(weights > 0, values, 0.0)
    mean = (kept * weights).sum() / max(number, 1)
    centred: Floats = np.where(weights > 0, kept - mean, 0.0)
    if np.abs(centred).max(initial=0.0) <= least:  # so it is where there is only one
        return np.zeros(len(values))
    variance = float((centred**2 * weights).sum()) / (number - 1)
    return centred / (math.sqrt(variance + epsilon_of_variance) + epsilon)


@dataclass(frozen=True, slots=True)
class RunningStatistics:
    """Mean and deviation of everything seen so far, merged batch by batch (Chan, Golub and LeVeque 1979).

    A value, so that whoever saves it in a thread while more is seen has all of it as of one moment.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Σ (x − mean)²."""
    lowest: float = 0.0
    highest: float = 0.0
    largest: float = 0.0
    """Of what was added up to any of it: noise is a share of that."""

    def including(self, values: Rewards, magnitudes: Rewards | None = None) -> RunningStatistics:
        """These and `values` [n]; `magnitudes` [n] is how much was added up to each where they are sums."""
        if not len(values):
            return self
        new = values.astype(np.float64)
        total = self.count + len(new)
        mean = float(new.mean())
        apart = mean - self.mean
        lowest = min(float(new.min()), self.lowest if self.count else np.inf)
        highest = max(float(new.max()), self.highest if self.count else -np.inf)
        added = () if magnitudes is None else (float(magnitudes.max()),)
        return RunningStatistics(
            count=total,
            mean=self.mean + apart * len(new) / total,
            squares=self.squares + float(((new - mean) ** 2).sum()) + apart**2 * self.count * len(new) / total,
            lowest=lowest,
            highest=highest,
            largest=max(self.largest, abs(lowest), abs(highest), *added),
        )

    @property
    def deviation(self) -> float:
        """σ with ddof = 1; exactly 0 where everything seen was the same, or fewer than two were seen."""
        if max(self.highest - self.mean, self.mean - self.lowest) <= NOISE * self.largest:
            return 0.0
        return float(np.sqrt(self.squares / (self.count - 1)))

    def whitened(self, rewards: Rewards, live: Flags) -> Floats:
        """[B] (R − mean) / (σ + ε); 0 where masked, and 0 while everything seen was the same."""
        deviation = self.deviation
        if not deviation:
            return np.zeros(len(rewards))
        return np.where(live, (rewards.astype(np.float64) - self.mean) / (deviation + EPSILON), 0.0)
