"""Which groups make a batch: exactly `batch_size` sequences, with the minimum of every environment that has one.

Pure functions of the groups that wait and of the order in which they are to leave. `exactly` is what the gateway does
by itself. `in_packs` and `in_packs_beside_minima` are the original's rules: groups that do not divide the largest stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from .exact_sums import can_sum_to, first_summing_to, fitting
from .group_queue import NOBODY, GroupQueue, Queued

__all__ = ["exactly", "in_packs", "in_packs_beside_minima"]

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


def in_packs(queue: GroupQueue[G], order: Iterable[Queued[G]], batch_size: int) -> list[Queued[G]] | None:
    """Packs of groups of one size that sum to the largest size, in the order in which they are complete."""
    if queue.sequences < batch_size:
        return None
    unfinished: dict[int, list[Queued[G]]] = {}
    taken: list[Queued[G]] = []
    missing, largest = batch_size, queue.largest
    for queued in order:
        pack = unfinished.setdefault(queued.size, [])
        pack.append(queued)
        if len(pack) * queued.size == largest:
            for member in unfinished.pop(queued.size):
                taken.append(member)
                missing -= member.size
                if missing <= 0:
                    return None if missing else taken
    return None


def in_packs_beside_minima(
    queue: GroupQueue[G], order: Iterable[Queued[G]], batch_size: int, least: Mapping[int, int]
) -> list[Queued[G]] | None:
    """First what each lane has to have `least`, then what still fits, all of whole packs of one lane and size."""
    packable = _Packable(queue)
    promised = {lane: wanted for lane, wanted in least.items() if wanted > 0}
    if not promised.keys() <= packable.counts.keys():
        return None
    wanted = _scaled(least, {lane: min(packable.counts[lane]) for lane in promised}, batch_size)
    taken = _minima({lane: packable.of(queue.lanes[lane].groups.values()) for lane in promised}, wanted, batch_size)
    already = set(taken)
    missing = batch_size - _total(taken)
    for queued in packable.of(order):
        if not missing:
            break
        if queued not in already and queued.size <= missing:
            taken.append(queued)
            missing -= queued.size
    return None if missing else taken


class _Packable:
    """The oldest groups of each lane and size, as many as make whole packs; those of NOBODY never do."""

    def __init__(self, queue: GroupQueue[G]) -> None:
        self.counts: dict[int, dict[int, int]] = {}
        """How many groups of a size there are in whole packs, by lane; lanes that have some."""
        largest = queue.largest
        for lane, own in queue.lanes.items():
            counts = {
                size: whole
                for size, count in own.sizes.items()
                if largest % size == 0 and (whole := count - count % (largest // size))
            }
            if counts and lane != NOBODY:
                self.counts[lane] = counts

    def of(self, groups: Iterable[Queued[G]]) -> Iterator[Queued[G]]:
        """Those of `groups`, which are all of their lanes, that are in whole packs."""
        left: dict[int, dict[int, int]] = {}
        for queued in groups:
            if queued.lane not in left:
                left[queued.lane] = dict(self.counts.get(queued.lane, {}))
            if left[queued.lane].get(queued.size, 0):
                left[queued.lane][queued.size] -= 1
                yield queued


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
