"""The kinds of environment, as protocols, and the records that they return."""

from __future__ import annotations

from ._stages.contracts.rollouts import Branch, RolloutResult
from ._stages.sampling.environment_calls import EnvironmentFailed
from ._stages.sampling.environment_mixture import EnvironmentMixture
from ._stages.sampling.environments import Environment, OutsideEnvironment, ScoredDataset, StepEnvironment

__all__ = [
    "Branch",
    "Environment",
    "EnvironmentFailed",
    "EnvironmentMixture",
    "OutsideEnvironment",
    "RolloutResult",
    "ScoredDataset",
    "StepEnvironment",
]
