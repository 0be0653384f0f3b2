"""Groups drawn as text, for tests of positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock import TrajectoryGroup

__all__ = ["of_turns"]


def of_turns(
    *masks: str, rewards: Sequence[float] | None = None, instance_id: str = "0", **columns: Any
) -> TrajectoryGroup:
    """Return one sequence for each mask, in which x trains and . does not.

    >>> of_turns(".x.x", "..x").completion_lengths().tolist()
    [2, 1]
    """
    return TrajectoryGroup.build(
        env="test",
        instance_id=instance_id,
        sequences=[[1] * len(mask) for mask in masks],
        loss_mask=[[letter == "x" for letter in mask] for mask in masks],
        rewards=[0.0] * len(masks) if rewards is None else rewards,
        **columns,
    )
