"""`SeenRun`: the facts about a run that rules read, from its folder or while it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from statistics import fmean
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from ..._schemas.bounds import Count
from ..accounting.end_states import EndState
from .course import Courses

SOLVED = 0.9
"""Level of the mean reward from which little is left to learn."""

Positive: TypeAlias = Annotated[float, Meta(ge=0)]


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """A section of a configuration; a key that is left out, or that a script has none of, is None."""


class SeenOptimizer(_Part, frozen=True):
    """Keys of `algorithm.optimizer`."""

    lr: Positive | None = None
    warmup_steps: Count | None = None


class SeenAlgorithm(_Part, frozen=True):
    """Keys of `algorithm`."""

    optimizer: SeenOptimizer = SeenOptimizer()
    group_size: Count | None = None
    max_lag: Count | None = None
    drop_zero_variance: bool = False
    kl: Positive | None = None
    steps: Count | None = None


class SeenSampling(_Part, frozen=True):
    """Keys of `sampling`."""

    max_completion_tokens: Count | None = None


class SeenConfig(_Part, frozen=True):
    """The keys of a configuration that rules read."""

    algorithm: SeenAlgorithm = SeenAlgorithm()
    sampling: SeenSampling = SeenSampling()


@dataclass(slots=True)
class SeenSamples:
    """The facts about samples of training that rules read."""

    lowest: float = inf
    highest: float = -inf
    """The extremes of their rewards."""
    stop_reasons: Counter[str] = field(default_factory=Counter)

    def note(self, reward: float | None, stop_reason: str, evaluated: int | None) -> None:
        """Add one, unless it was evaluated, or its reward is not finite."""
        if evaluated is not None or reward is None or not isfinite(reward):
            return
        self.lowest, self.highest = min(self.lowest, reward), max(self.highest, reward)
        self.stop_reasons[stop_reason] += 1


@dataclass(slots=True)
class SeenRun:
    """A run that is diagnosed."""

    courses: Courses
    config: SeenConfig = field(default_factory=SeenConfig)
    samples: SeenSamples = field(default_factory=SeenSamples)
    ends: Mapping[EndState, int] = field(default_factory=dict)
    """Trajectories by the state that they ended in, as the ledger counts them; empty if unknown."""
    damaged: list[str] = field(default_factory=list)
    """Parts of the folder that could not be read, as text."""

    @property
    def step(self) -> int:
        """Return the last step."""
        return self.courses.step

    def level(self, rewards: list[float]) -> float | None:
        """Return the mean of `rewards` between the lowest, 0, and the highest reward of the run, 1; None if unknown."""
        low = min(self.samples.lowest, self.courses.of("sampled/reward/min").lowest)
        high = max(self.samples.highest, self.courses.of("sampled/reward/max").highest)
        return (fmean(rewards) - low) / (high - low) if rewards and high > low else None

    @property
    def improves(self) -> bool:
        """Return whether the reward rises, or is near the highest one already: a run that works."""
        reward = self.courses.of("reward")
        level = self.level(reward.recent())
        return reward.rises() or (level is not None and level >= SOLVED)
