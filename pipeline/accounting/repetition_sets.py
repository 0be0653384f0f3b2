"""Sets of repetitions of a prompt, as bit masks: bit r stands for repetition r."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from ..._schemas import GroupId, TrainBatch, TrajectoryGroup, TrajectoryId
from ..._schemas.layout import check_sequences

MASKS_CACHED = 16
"""Columns whose masks are cached: groups of one size mostly number their repetitions alike."""


def mask_of(repetitions: Iterable[int]) -> int:
    """Return the bit mask of `repetitions`.

    >>> bin(mask_of([0, 3]))
    '0b1001'
    """
    mask = 0
    for repetition in repetitions:
        mask |= 1 << repetition
    return mask


def mask_in(column: NDArray[np.int64]) -> int:
    """Return the bit mask of all repetitions in `column`."""
    return _mask_in(column.tobytes())


def masks_in(column: NDArray[np.int64], counts: Iterable[int]) -> list[int]:
    """Return the bit masks of groups of `counts` repetitions each, one after the other in `column`.

    >>> [bin(mask) for mask in masks_in(np.array([0, 3, 1]), [2, 1])]
    ['0b1001', '0b10']
    """
    raw, width = column.tobytes(), column.itemsize
    return [_mask_in(raw[a * width : b * width]) for a, b in pairwise(accumulate(counts, initial=0))]


@lru_cache(maxsize=MASKS_CACHED)
def _mask_in(column: bytes) -> int:
    return mask_of(memoryview(column).cast("q"))


def iter_bits(mask: int) -> Iterator[int]:
    """Yield the repetitions in `mask`, in order.

    >>> list(iter_bits(0b1001))
    [0, 3]
    """
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def trajectories(group: GroupId, mask: int) -> list[TrajectoryId]:
    """Return the ids of the repetitions in `mask`."""
    return [TrajectoryId(*group, repetition) for repetition in iter_bits(mask)]


def masks_by_group(what: TrajectoryGroup | TrainBatch | Iterable[TrajectoryId]) -> Collection[tuple[GroupId, int]]:
    """Return the repetitions of each group, as bit masks.

    Raises:
        InvalidRecord: a group has no sequences.
    """
    if isinstance(what, TrajectoryGroup):
        check_sequences(len(what))
        return [(what.id, mask_in(what.rollout_ids))]
    masks: dict[GroupId, int] = {}
    for trajectory in what.ids if isinstance(what, TrainBatch) else what:
        group = trajectory.group
        masks[group] = masks.get(group, 0) | 1 << trajectory.repetition_id
    return masks.items()


def set_mask(masks: dict[GroupId, int], group: GroupId, mask: int) -> None:
    """Set the mask of `group`; an empty one is removed."""
    if mask:
        masks[group] = mask
    else:
        masks.pop(group, None)


def exclude(record: TrajectoryGroup, mask: int) -> TrajectoryGroup | None:
    """Return `record` less the repetitions in `mask`: itself if it has none of them, None if it has no others."""
    here = mask_in(record.rollout_ids)
    if not here & mask:
        return record
    if not here & ~mask:
        return None
    return record.select(~np.isin(record.rollout_ids, list(iter_bits(mask))))
