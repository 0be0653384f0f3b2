"""What will not move by itself, and why, in words: sizes that make no batch, environments that batches wait for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .....pipeline.telemetry import get_logger
from .demands import Demands
from .environments import Environment
from .group_queue import GroupQueue

__all__ = ["Stuck", "Watch", "unpackable"]

LOOK_S = 5.0
"""How often it is looked whether anything is stuck."""

log = get_logger("penstock.atropos.queue")


@lru_cache(maxsize=16)
def unpackable(sizes: frozenset[int], batch_size: int) -> frozenset[int]:
    """Those of the `sizes` that are in no batch, however many there come of each.

    >>> sorted(unpackable(frozenset({3, 4}), 8)), sorted(unpackable(frozenset({1, 3, 4}), 8))
    ([3], [])
    """
    sums = _sums(sizes, batch_size)
    return frozenset(size for size in sizes if size > batch_size or not sums >> batch_size - size & 1)


@dataclass(frozen=True, slots=True)
class Stuck:
    """Finds it in queue of one kind."""

    capacity: int | None
    """Groups that they hold."""
    batches: bool
    """Whether they make any."""

    def reasons(
        self, queue: GroupQueue[Any], envs: list[Environment[Any]], batch_size: int, demands: Demands
    ) -> Iterator[str]:
        """One sentence for each; `batch_size` is 0 where no trainer registered, `demands` those that are heeded now."""
        yield from _unfinished(envs)
        if self.batches and batch_size:
            yield from self._never_packed(_sizes(queue, demands), batch_size)
            yield from _awaited(queue, envs, batch_size, demands.least)
        elif self.batches and queue.sequences:
            yield "groups wait, and no trainer registered"

    def unpackable(self, queue: GroupQueue[Any], batch_size: int, demands: Demands) -> frozenset[int]:
        """Sizes of groups that are in no batch."""
        if not self.batches or not batch_size:
            return frozenset()
        return unpackable(_sizes(queue, demands), batch_size)

    def _never_packed(self, sizes: frozenset[int], batch_size: int) -> Iterator[str]:
        largest, none = max(sizes, default=0), unpackable(sizes, batch_size)
        for size in sorted(sizes):
            if size in none:
                among = f"with groups of {sorted(sizes)}"
                yield f"groups of {size} are in no batch of {batch_size}: {among} none sums to it"
        if sizes and self.capacity is not None and self.capacity * largest < batch_size:
            room = f"a capacity of {self.capacity} groups"
            yield f"{room} holds no batch of {batch_size}, with groups of at most {largest}"


def _sizes(queue: GroupQueue[Any], demands: Demands) -> frozenset[int]:
    """Of groups that wait, and of those that environments which count said they would send."""
    return frozenset(queue.sizes.keys() | demands.group_sizes)


def _awaited(
    queue: GroupQueue[Any], envs: list[Environment[Any]], batch_size: int, least: Mapping[int, int]
) -> Iterator[str]:
    """Environments that hold batches back by their minimum."""
    for env in envs:
        wanted = least.get(env.env_id, 0)
        if batch_size <= queue.sequences and wanted > 0 and env.env_id not in queue.lanes:
            yield f"batches wait for {env.name}, which is to have {wanted} of {batch_size} and has none that waits"


def _unfinished(envs: list[Environment[Any]]) -> Iterator[str]:
    """Environments that hold back their own groups by sizes that do not add up."""
    for env in envs:
        if env.buffer.sequences >= 2 * env.buffer.group_size:
            sizes = sorted({group.sequences for group in env.buffer.groups})
            yield f"groups of {sizes} of {env.name} do not make up its group_size of {env.buffer.group_size}"


class Watch:
    """Logs what is stuck: once when it has been for a while, and once when it is no more."""

    def __init__(self) -> None:
        self._due = -math.inf
        self._seen = set[str]()
        """At the last look."""
        self._told = set[str]()

    def look(self, now: float, reasons: Callable[[], Iterable[str]]) -> None:
        """Look whether anything is stuck, if it is time to; much that waits for others waits for a moment."""
        if now < self._due:
            return
        self._due = now + LOOK_S
        before, self._seen = self._seen, {*reasons()}
        for reason in sorted(self._seen & before - self._told):
            log.warning("stalled", reason=reason)
        for reason in sorted(self._told - self._seen):
            log.info("stall_resolved", reason=reason)
        self._told = self._seen & (before | self._told)


def _sums(sizes: Iterable[int], most: int) -> int:
    """Bit n says whether sizes, each as often as one likes, sum to n."""
    reached, within = 1, (1 << most + 1) - 1
    for size in sizes:
        step = size
        while step <= most:
            reached |= reached << step & within
            step *= 2
    return reached
