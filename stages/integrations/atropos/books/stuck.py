"""What will not move by itself, and why, in words: sizes that make no batch, environments that batches wait for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .environments import Environment
from .group_queue import GroupQueue
from .habits import Habits

__all__ = ["awaited", "unpackable"]


def unpackable(
    queue: GroupQueue[Any], envs: list[Environment[Any]], batch_size: int, capacity: int | None, habits: Habits
) -> Iterator[str]:
    """Group sizes, of what waits and of environments that count, that are in no batch of these sizes."""
    sizes = {*queue.sizes, *(env.buffer.group_size for env in envs)}
    if not sizes or not batch_size:
        if queue.sequences:
            yield f"{len(queue)} groups wait, and no trainer registered"
        return
    largest, sums = max(sizes), _sums(sizes, batch_size)
    for size in sorted(sizes):
        if habits.whole_packs and largest % size:
            yield f"groups of {size} wait while there is one of {largest}, which they do not divide (whole_packs)"
        elif size > batch_size or not sums >> batch_size - size & 1:
            yield f"groups of {size} are in no batch of {batch_size}: with groups of {sorted(sizes)} none sums to it"
    if capacity is not None and capacity * largest < batch_size:
        yield f"a capacity of {capacity} groups holds no batch of {batch_size}, with groups of at most {largest}"


def awaited(
    queue: GroupQueue[Any], envs: list[Environment[Any]], batch_size: int, least: Mapping[int, int]
) -> Iterator[str]:
    """Environments that hold batches back by their minimum, or their own groups by sizes that do not add up."""
    for env in envs:
        wanted = least.get(env.env_id, 0)
        if batch_size <= queue.sequences and wanted > 0 and env.env_id not in queue.lanes:
            yield f"batches wait for {env.name}, which is to have {wanted} of {batch_size} and has none that waits"
        if env.buffer.sequences >= 2 * env.buffer.group_size:
            sizes = sorted({group.sequences for group in env.buffer.groups})
            yield f"groups of {sizes} of {env.name} do not make up its group_size of {env.buffer.group_size}"


def _sums(sizes: Iterable[int], most: int) -> int:
    """Bit n says whether sizes, each as often as one likes, sum to n."""
    reached, within = 1, (1 << most + 1) - 1
    for size in sizes:
        step = size
        while step <= most:
            reached |= reached << step & within
            step *= 2
    return reached
