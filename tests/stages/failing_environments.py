"""Environments that fail, for tests in one process and in several."""

from __future__ import annotations

import numpy as np
from tests.fake_policy import completion_of

from penstock.environments import RolloutResult


class AlwaysRaises:
    """Brings no rollout; every message is another one."""

    async def rollout(self, task: int, repetition: int) -> RolloutResult:
        raise ValueError(f"no simulator for task {task}, repetition {repetition}")


class SucceedsOnce:
    """Brings one rollout of each prompt."""

    async def rollout(self, task: int, repetition: int) -> RolloutResult:  # noqa: ARG002 (the protocol's)
        if repetition:
            raise ValueError("no simulator")
        return RolloutResult(turns=[np.array([1], np.int32), completion_of("x")], reward=1.0)
