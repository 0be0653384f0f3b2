"""Environments that fail, for tests in one process and in several."""

from __future__ import annotations

import numpy as np
from tests.fake_policy import completion_of

from penstock import StopReason
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


class LearnsFrom:
    """Brings rollouts with different rewards for every `every`-th prompt, and equal ones for all others."""

    def __init__(self, every: int, stop_reason: StopReason = StopReason.STOP) -> None:
        self._every = every
        self._stop_reason = stop_reason

    async def rollout(self, task: int, repetition: int) -> RolloutResult:
        differs = task % self._every == self._every - 1
        prompt = np.array([1], np.int32)
        return RolloutResult(
            turns=[prompt, completion_of("x")], reward=float(differs and repetition), stop_reason=self._stop_reason
        )


NEVER = 10**9


def all_equal() -> LearnsFrom:
    """Return an environment without a difference in reward."""
    return LearnsFrom(NEVER)


def all_cut() -> LearnsFrom:
    """Return an environment of which every completion is cut."""
    return LearnsFrom(1, StopReason.LENGTH)


def all_different() -> LearnsFrom:
    """Return an environment in which every group differs in reward."""
    return LearnsFrom(1)


def one_in_120() -> LearnsFrom:
    """Return an environment in which one group of 120 differs in reward."""
    return LearnsFrom(120)
