"""What a sender says of single sequences in `meta`: `{"overrides": [{}, {"set_advantage_to_zero": true}]}`.

The list is indexed by repetition id. A sequence that is marked so has entered every statistic, and nothing is learned
from it: its advantage is 0, and none of its tokens trains, so that no other term of a loss moves it either. Who makes
advantages sees to that once it has compared, and who makes batches for those that nobody compared.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..._schemas import TrajectoryGroup
from ..._schemas.columns import freeze

__all__ = ["zero_advantages"]


def zero_advantages(group: TrajectoryGroup) -> TrajectoryGroup:
    """`group` as its sender wants it trained: itself where nothing is marked, or all of that trains nothing already."""
    overrides = group.meta.get("overrides")
    if not isinstance(overrides, list):
        return group
    marked = {number for number, said in enumerate(overrides) if _silences(said)}
    rows = np.array([repetition in marked for repetition in group.repetition_ids.tolist()], np.bool_)
    heard = ~rows.repeat(group.lengths())
    columns: dict[str, NDArray[Any]] = {"loss_mask": group.loss_mask & heard}
    if group.advantages is not None:
        columns["advantages"] = np.where(heard, group.advantages, np.float32(0))
    if all(np.array_equal(column, getattr(group, name)) for name, column in columns.items()):
        return group
    freeze(columns.values())
    return msgspec.structs.replace(group, **columns)


def _silences(said: object) -> bool:
    return isinstance(said, dict) and bool(said.get("set_advantage_to_zero"))
