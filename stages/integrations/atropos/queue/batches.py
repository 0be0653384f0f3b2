"""Which groups make a batch: exactly `batch_size` sequences, with the minimum of every environment that has one.

Pure functions of the groups that wait and of the order in which they are to leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from .exact_sums import can_sum_to, first_summing_to, fitting
from .group_queue import GroupQueue, Queued

__all__ = ["exactly"]

G = TypeVar("G")


def exactly(
    queue: GroupQueue[G], order: Callable[[], Iterable[Queued[G]]], batch_size: int, least: Mapping[int, int]
) -> list[Queued[G]] | None:
    """First what each lane has to have `least`, then the next in `order` that sum to what is missing.

    Where the first leaves no such sum, the minima yield: a batch that holds less of one environment comes before none.
    Where one has to have something and has nothing that waits, there is no batch.
    """
    promised = {lane: wanted for lane, wanted in least.items() if wanted > 0}
    if not promised.keys() <= queue.lanes.keys():
        return None
    if queue.sequences < batch_size or not can_sum_to(queue.sizes, batch_size):
        return None
    smallest = {lane: min(queue.lanes[lane].sizes) for lane in promised}
    wanted = _scaled(promised, smallest, batch_size)
    first = _minima({lane: queue.lanes[lane].groups.values() for lane in wanted}, wanted, batch_size)
    return _filled(first, order(), batch_size) or (_filled([], order(), batch_size) if first else None)


def _filled(first: list[Queued[G]], order: Iterable[Queued[G]], batch_size: int) -> list[Queued[G]] | None:
    """Add others to the `first` until there are `batch_size`: the next in order wherever that can be, and so on."""
    missing = batch_size - _total(first)
    already = set(first)
    others: list[Queued[G]] = []

    def sizes() -> Iterator[int]:
        for queued in order:
            if queued not in already:
                others.append(queued)
                yield queued.size

    chosen = fitting(sizes(), missing)
    if sum(others[index].size for index in chosen) < missing:
        found = first_summing_to([queued.size for queued in others], missing)
        if found is None:
            return None
        chosen = found
    return first + [others[index] for index in chosen]


def _scaled(least: Mapping[int, int], smallest: Mapping[int, int], batch_size: int) -> dict[int, int]:
    """Minima that fit in a batch together, and still a group each. Those of nothing are left out."""
    together = sum(least.values())
    if together <= batch_size:
        return {lane: wanted for lane, wanted in least.items() if wanted > 0}
    return {lane: max(smallest[lane], wanted * batch_size // together) for lane, wanted in least.items() if wanted > 0}


def _minima(groups: Mapping[int, Iterable[Queued[G]]], wanted: Mapping[int, int], batch_size: int) -> list[Queued[G]]:
    """The oldest groups of each lane until it has what is `wanted`, leaving out what would be too much for a batch."""
    taken: list[Queued[G]] = []
    missing = batch_size
    for lane, least in wanted.items():
        goal = missing - least
        for queued in groups[lane]:
            if missing <= goal:
                break
            if queued.size <= missing:
                taken.append(queued)
                missing -= queued.size
    return taken


def _total(groups: Iterable[Queued[G]]) -> int:
    return sum(queued.size for queued in groups)
