"""What a sender says of single sequences in `meta`: `{"overrides": [{}, {"set_advantage_to_zero": true}]}`.

The list is indexed by repetition id. A sequence that is marked so has entered every statistic, and nothing is learned
from it: its advantage is 0, and none of its tokens trains, so that no other term of a loss moves it either.
"""

from __future__ import annotations

import msgspec
import numpy as np

from ...schemas import TrajectoryGroup
from ...schemas.columns import freeze

__all__ = ["silenced"]


def silenced(group: TrajectoryGroup) -> TrajectoryGroup:
    """`group`, which has advantages, as its sender wants it: itself where nothing is marked."""
    overrides = group.meta.get("overrides")
    if not isinstance(overrides, list):
        return group
    marked = {number for number, said in enumerate(overrides) if _silences(said)}
    rows = np.array([repetition in marked for repetition in group.repetition_ids.tolist()], np.bool_)
    if group.advantages is None or not rows.any():
        return group
    heard = ~rows.repeat(group.lengths())
    advantages, mask = np.where(heard, group.advantages, np.float32(0)), group.loss_mask & heard
    freeze([advantages, mask])
    return msgspec.structs.replace(group, advantages=advantages, loss_mask=mask)


def _silences(said: object) -> bool:
    return isinstance(said, dict) and bool(said.get("set_advantage_to_zero"))
