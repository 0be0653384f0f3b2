"""The kinds of environment, as protocols, and the records that they return."""

from __future__ import annotations

from ._stages.sampling.environments import (
    Environment,
    EnvironmentFailed,
    OutsideEnvironment,
    RolloutResult,
    ScoredDataset,
    StepEnvironment,
)

__all__ = [
    "Environment",
    "EnvironmentFailed",
    "OutsideEnvironment",
    "RolloutResult",
    "ScoredDataset",
    "StepEnvironment",
]
