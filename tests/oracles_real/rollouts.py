"""Responses of several groups, as rectangles for the peers and as groups for penstock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock import TrajectoryGroup

__all__ = ["ROLLOUTS", "WEIGHTS", "Rollouts"]

LONGEST = 11

WEIGHTS = {"right": 1.0, "short": 0.5, "polite": 2.0}


@dataclass(frozen=True)
class Rollouts:
    """Responses of several groups as rectangles, float64 but the mask and the index."""

    sizes: tuple[int, ...]
    mask: Tensor
    """[B, L] bool."""
    rewards: Tensor
    """[B]."""
    parts: Tensor
    """[B, 3] in the order of `WEIGHTS`; their weighted sum is the reward."""
    values: Tensor
    """[B, L] of a critic."""

    @property
    def index(self) -> Any:
        """Return [B] the group of each, as numpy."""
        return np.arange(len(self.sizes)).repeat(self.sizes)

    @property
    def floats(self) -> Tensor:
        """Return the mask as float64."""
        return self.mask.double()

    @property
    def token_rewards(self) -> Tensor:
        """Return [B, L] the rewards, each on the last token."""
        rewards = torch.zeros(self.mask.shape, dtype=torch.float64)
        rewards[:, -1] = self.rewards
        return rewards

    def groups(self) -> list[TrajectoryGroup]:
        """Return the same behind prompts of one token."""
        return [self._group(number) for number in range(len(self.sizes))]

    def _group(self, number: int) -> TrajectoryGroup:
        here = torch.tensor(self.index == number)
        size = self.sizes[number]
        weighted = self.parts[here] * torch.tensor(list(WEIGHTS.values()))
        return TrajectoryGroup.build(
            env="test",
            instance_id=str(number),
            sequences=[[1] * (1 + LONGEST)] * size,
            loss_mask=[[False, *row] for row in self.mask[here].tolist()],
            rewards=self.rewards[here].tolist(),
            values=[[0.0, *row] for row in self.values[here].tolist()],
            reward_parts=dict(zip(WEIGHTS, weighted.T.numpy(), strict=True)),
        )


def made(seed: int, sizes: tuple[int, ...], *, equal: bool = False, whole: bool = False) -> Rollouts:
    """Return rollouts whose rewards are exact in float32; those of the last group are equal, or all are.

    Two tokens of each do not train, nor do those behind its length, which is the longest in `whole` ones.
    """
    random = np.random.default_rng(seed)
    count = sum(sizes)
    lengths = random.integers(1, LONGEST + 1, count)
    lengths[1] = 1
    mask = whole | (np.arange(LONGEST) < lengths[:, None])
    mask[:, 3:5] = False
    parts = random.integers(0, 4, (count, len(WEIGHTS))) / 2
    parts[count - sizes[-1] :] = parts[-1]
    if equal:
        parts[:] = 0.5
    values = random.integers(-16, 16, (count, LONGEST)) / 8
    rewards = parts @ np.array(list(WEIGHTS.values()))
    return Rollouts(sizes, torch.tensor(mask), *(torch.tensor(each) for each in (rewards, parts, values)))


ROLLOUTS = {
    "ragged": made(1, (5, 1, 3, 4)),
    "even": made(2, (4, 4, 4)),
    "pairs": made(3, (2, 2, 2, 2)),
    "equal": made(4, (4, 4), equal=True),
    "whole": made(5, (3, 3, 3), whole=True),
}
