"""Some of the repetitions of a prompt, as a bit mask: bit r stands for repetition r."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from ..schemas import GroupId, TrajectoryGroup, TrajectoryId

__all__ = ["bits", "mask_of", "noted", "trajectories", "without"]


def mask_of(repetitions: Iterable[int]) -> int:
    """The bit mask of these.

    >>> bin(mask_of([0, 3]))
    '0b1001'
    """
    mask = 0
    for repetition in repetitions:
        mask |= 1 << repetition
    return mask


def bits(mask: int) -> Iterator[int]:
    """The repetitions again, in order.

    >>> list(bits(0b1001))
    [0, 3]
    """
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def trajectories(group: GroupId, mask: int) -> list[TrajectoryId]:
    """Who they are."""
    return [TrajectoryId(*group, repetition) for repetition in bits(mask)]


def noted(masks: dict[GroupId, int], group: GroupId, mask: int) -> None:
    """Note that `mask` is what there is of `group`; an empty one takes no room."""
    if mask:
        masks[group] = mask
    else:
        masks.pop(group, None)


def without(record: TrajectoryGroup, mask: int) -> TrajectoryGroup | None:
    """`record` less the repetitions in `mask`: itself where it has none of them, None where it has no others."""
    here = mask_of(record.repetition_ids.tolist())
    if not here & mask:
        return record
    if not here & ~mask:
        return None
    return record.select(~np.isin(record.repetition_ids, list(bits(mask))))
