"""Flows of groups that are given, and a filter of ROLL's: named in its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from tests.trl_real.letters import GROUP

from penstock import Flow, SendChannel, TrajectoryGroup, source
from penstock.integrations.roll import RollJob

GIVEN = 64
"""Groups in all: more than any test takes."""


def given(number: int, version: int = 0) -> TrajectoryGroup:
    """Return group `number`: of one or two turns, each rollout of another length, all rewards different.

    Every sixth has equal rewards.
    """
    draw = np.random.default_rng(number)
    sequences, masks, rewards, logprobs = [], [], [], []
    for repetition in range(GROUP):
        turns = [[0] * 3 + [1] * int(draw.integers(1, 6)) for _ in range(1 + (number + repetition) % 2)]
        mask = [flag for turn in turns for flag in turn]
        sequences.append(draw.integers(1, 27, len(mask)))
        masks.append(mask)
        rewards.append(np.where(np.cumsum(mask) == sum(mask), mask, 0) * draw.integers(1, 9) / 8)
        logprobs.append(-draw.random(len(mask)).astype(np.float32) * mask)
    scores = [float(row.sum()) if number % 6 else 0.0 for row in rewards]
    return TrajectoryGroup.build(
        env="given",
        instance_id=str(number),
        sequences=sequences,
        loss_mask=masks,
        rewards=scores,
        behavior_logprobs=logprobs,
        policy_versions=[version] * GROUP,
    )


@dataclass(frozen=True)
class Given:
    """Sends the groups, sampled by the weights of step 0 or of another one."""

    version: int = 0
    count: int = GIVEN

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        for number in range(self.count):
            await outbox.send(given(number, self.version))


def flow(job: RollJob) -> Flow[TrajectoryGroup]:
    return source(Given(job.options.get("version", 0)))


def failing(job: RollJob) -> Flow[TrajectoryGroup]:
    """Return a flow that fails when it begins."""
    del job

    class Fails:
        async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
            del outbox
            raise RuntimeError("the environment is gone")

    return source(Fails())


class EqualRewards:
    """ROLL's `group_filter_cls`: drops groups whose rewards are all equal."""

    def __init__(self, *_: Any) -> None:
        pass

    def filter(self, group_id: int, episode_id: int, group: list[Any]) -> bool:
        """Return whether to drop a group."""
        del group_id, episode_id
        return len({float(rollout.batch["scores"].sum()) for rollout in group}) == 1
