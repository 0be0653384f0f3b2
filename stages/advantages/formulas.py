"""Advantages: pure functions over packed columns, in float64, without loops over tokens or sequences.

Axes: B sequences, G groups lying one after another, `sizes` [G] sequences each. A sequence is live when it has a token
that trains; one that is masked entirely has advantage 0 and enters no statistic. Let R be the reward of a sequence, μ
and σ (ddof = 1) mean and deviation over the n live sequences of its group, l the tokens of a sequence that train:

    none                  R                         REINFORCE without a baseline
    grpo                  (R − μ) / (σ + 1e-6)      DeepSeekMath, arXiv:2402.03300
    dr_grpo               R − μ                     "Understanding R1-Zero-Like Training", arXiv:2503.20783
    rloo                  n / (n − 1) · (R − μ)     the mean of the others as baseline, arXiv:2402.14740
    maxrl                 (R − μ) / μ, 0 where μ <= 0   "Maximum Likelihood RL", arXiv:2602.02710
    opo                   R − Σ l·R / Σ l           the baseline of least variance, arXiv:2505.23585
    batch                 as grpo, μ and σ over all groups of the stack
    global                as grpo, μ and σ over all rewards so far
    reinforce++           returns (see `returns`), whitened over all tokens of the stack that train, arXiv:2501.03262
    reinforce++-baseline  dr_grpo, whitened over all tokens of the stack that train
    gae                   see `returns`; whitened over all tokens of the stack, or not

We differ from the libraries where they are wrong: a population of one, and one in which no two rewards differ by more
than their noise, give exactly 0; elsewhere the result is (R − 0) / (1 + ε), or noise divided by noise. Where two differ
by more, all rewards are taken as they are. `presets` contains the rules of the libraries.

Two values differ by more than their noise if the least possible value of one is above the greatest of the other. So all
are equal if, and only if, the highest of the least values is at most the lowest of the greatest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Mode: TypeAlias = Literal[
    "none",
    "batch",
    "global",
    "gdpo",
    "grpo",
    "dr_grpo",
    "rloo",
    "maxrl",
    "opo",
    "reinforce++",
    "reinforce++-baseline",
    "gae",
]
"""The ways to compute advantages."""

Floats: TypeAlias = NDArray[np.float64]
Rewards: TypeAlias = NDArray[np.float32] | Floats
Flags: TypeAlias = NDArray[np.bool_]
Counts: TypeAlias = NDArray[np.int64]

EPSILON = 1e-6
"""Added to σ before dividing, as verl and SkyRL do."""


class Groups:
    """Rewards beside those of their group, with exact zeros where the rewards of a group do not differ.

    `noise` [B] is how far rounding may have moved each reward.
    """

    __slots__ = ("centred", "counts", "deviations", "means", "owners")

    def __init__(self, rewards: Rewards, live: Flags, sizes: Counts, noise: Floats) -> None:
        values = np.where(live, rewards, 0.0).astype(np.float64)
        number = len(sizes)
        self.owners = np.arange(number).repeat(sizes)
        """[B] the group of each sequence."""
        self.counts = np.bincount(self.owners, live, number)
        """[G] live sequences."""
        alive = np.maximum(self.counts, 1)
        means = np.bincount(self.owners, values, number) / alive
        self.means = np.where(
            abs(means) > np.bincount(self.owners, np.where(live, noise, 0.0), number) / alive, means, 0.0
        )
        """[G] μ; exactly 0 where it is no larger than its noise."""
        centred = np.where(live, values - means[self.owners], 0.0)
        self.centred = np.where(_differ(values, noise, live, sizes)[self.owners], centred, 0.0)
        """[B] R − μ; 0 where masked, alone, or equal to all others."""
        squares = np.bincount(self.owners, self.centred**2, number)
        self.deviations = np.sqrt(squares / np.maximum(self.counts - 1, 1))
        """[G] σ; exactly 0 where all live sequences have the same reward, or there are fewer than two."""


def _differ(values: Floats, noise: Floats, live: Flags, sizes: Counts) -> Flags:
    """Return [G] true on groups with two live values [B] that differ by more than the noise [B] of these two."""
    filled = sizes > 0
    starts = (sizes.cumsum() - sizes)[filled]
    differ = np.zeros(len(sizes), np.bool_)
    differ[filled] = np.maximum.reduceat(np.where(live, values - noise, -np.inf), starts) > np.minimum.reduceat(
        np.where(live, values + noise, np.inf), starts
    )
    return differ


def grpo(groups: Groups, epsilon: float = EPSILON) -> Floats:
    """Return [B] (R − μ) / (σ + ε) within each group."""
    return groups.centred / (groups.deviations + epsilon)[groups.owners]


def dr_grpo(groups: Groups) -> Floats:
    """Return [B] R − μ within each group."""
    return groups.centred


def rloo(groups: Groups) -> Floats:
    """Return [B] R − the mean of the others in the group, equal to n / (n − 1) · (R − μ)."""
    return groups.centred * (groups.counts / np.maximum(groups.counts - 1, 1))[groups.owners]


def maxrl(groups: Groups, epsilon: float | None = None) -> Floats:
    """Return [B] (R − μ) / μ within each group, 0 where μ is not positive; or (R − μ) / (μ + ε) with an `epsilon`.

    For rewards of 0 and 1, and on average over groups of n, this is the gradient of the likelihood of a right answer,
    up to the n-th term of its series in the share of wrong ones. Rewards below 0 have no such meaning.
    """
    if epsilon is not None:
        return groups.centred / (groups.means + epsilon)[groups.owners]
    scale = np.where(groups.means > 0, groups.means, np.inf)
    return groups.centred / scale[groups.owners]


def opo(groups: Groups, lengths: Counts) -> Floats:
    """Return [B] R − the mean of the group weighted by `lengths` [B], the tokens of each sequence that train."""
    number = len(groups.counts)
    weighted = np.bincount(groups.owners, groups.centred * lengths, number)
    baselines = weighted / np.maximum(np.bincount(groups.owners, lengths, number), 1)
    return np.where(lengths > 0, groups.centred - baselines[groups.owners], 0.0)


def whitened(
    values: Floats,
    weights: Counts | Flags,
    noise: Floats,
    *,
    epsilon: float = EPSILON,
    epsilon_of_variance: float = 0.0,
) -> Floats:
    """Return [M] (x − m) / (√(σ² + ε') + ε), with m and σ over all values [M], each counted `weights` [M] times.

    Exactly 0 where the weight is 0, and everywhere if no two values differ by more than the `noise` [M] of these two.
    """
    counted = weights > 0
    kept = np.where(counted, values, 0.0)
    if not _differ(kept, noise, counted, np.array([len(kept)])).any():  # true also for a single value
        return np.zeros(len(values))
    number = int(weights.sum())
    mean = (kept * weights).sum() / number
    centred: Floats = np.where(counted, kept - mean, 0.0)
    variance = float((centred**2 * weights).sum()) / (number - 1)
    return centred / (math.sqrt(variance + epsilon_of_variance) + epsilon)


@dataclass(frozen=True, slots=True)
class RunningStatistics:
    """Mean and deviation of all rewards so far, merged batch by batch (Chan, Golub and LeVeque 1979).

    Immutable, so that a thread that saves it while more rewards arrive has a consistent state.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Σ (x − mean)²."""
    lowest: float = 0.0
    """Minimum over the values of the greatest that each may have been before rounding."""
    highest: float = 0.0
    """Maximum over the values of the least that each may have been."""

    @classmethod
    def of(cls, values: Rewards, noise: Floats) -> RunningStatistics:
        """Return the statistics of `values` [n]. Rounding may have moved each by its `noise` [n]."""
        if not len(values):
            return cls()
        new = values.astype(np.float64)
        mean = float(new.mean())
        lowest, highest = float((new + noise).min()), float((new - noise).max())
        return cls(len(new), mean, float(((new - mean) ** 2).sum()), lowest, highest)

    def including(self, values: Rewards, noise: Floats) -> RunningStatistics:
        """Return the statistics with `values` [n] added; see `of`."""
        return self.merged(RunningStatistics.of(values, noise))

    def merged(self, other: RunningStatistics) -> RunningStatistics:
        """Return the statistics of the values of both."""
        if not self.count or not other.count:
            return self if self.count else other
        total, apart = self.count + other.count, other.mean - self.mean
        return RunningStatistics(
            count=total,
            mean=self.mean + apart * other.count / total,
            squares=self.squares + other.squares + apart**2 * self.count * other.count / total,
            lowest=min(self.lowest, other.lowest),
            highest=max(self.highest, other.highest),
        )

    @property
    def variance(self) -> float:
        """Return σ² with ddof = 1; 0 for a single value."""
        return self.squares / max(1, self.count - 1)

    @property
    def deviation(self) -> float:
        """Return σ with ddof = 1; exactly 0 where no two values differ by more than their noise."""
        if self.highest <= self.lowest:
            return 0.0
        return math.sqrt(self.variance)

    def whitened(self, rewards: Rewards, live: Flags) -> Floats:
        """Return [B] (R − mean) / (σ + ε); 0 where masked, and 0 while all values so far are equal."""
        deviation = self.deviation
        if not deviation:
            return np.zeros(len(rewards))
        return np.where(live, (rewards.astype(np.float64) - self.mean) / (deviation + EPSILON), 0.0)
