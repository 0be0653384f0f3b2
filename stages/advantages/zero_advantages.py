"""Overrides of single sequences by their sender, in `meta`: `{"overrides": [{}, {"set_advantage_to_zero": true}]}`.

The list is indexed by repetition id. A marked sequence enters every statistic and does not train: its advantage is 0,
and its loss mask is false, so that no other term of a loss trains it either. AdvantageNormalizer applies the overrides
after it has compared the rewards, and Batcher to groups that no normalizer has compared.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..._schemas import TrajectoryGroup
from ..._schemas.columns import freeze


def zero_advantages(group: TrajectoryGroup) -> TrajectoryGroup:
    """Return `group` with the overrides of its sender applied; the same object if all are in effect already."""
    overrides = group.meta.get("overrides")
    if not isinstance(overrides, list):
        return group
    marked = {number for number, override in enumerate(overrides) if _is_marked(override)}
    rows = np.array([repetition in marked for repetition in group.rollout_ids.tolist()], np.bool_)
    return masked(group, rows)


def masked(group: TrajectoryGroup, rows: NDArray[np.bool_]) -> TrajectoryGroup:
    """Return `group` with `rows` [S] not trained, and advantage 0; the same object if they are so already."""
    kept = ~rows.repeat(group.lengths())
    columns: dict[str, NDArray[Any]] = {"loss_mask": group.loss_mask & kept}
    if group.advantages is not None:
        columns["advantages"] = np.where(kept, group.advantages, np.float32(0))
    if all(np.array_equal(column, getattr(group, name)) for name, column in columns.items()):
        return group
    freeze(columns.values())
    return msgspec.structs.replace(group, **columns)


def _is_marked(override: object) -> bool:
    return isinstance(override, dict) and bool(override.get("set_advantage_to_zero"))
