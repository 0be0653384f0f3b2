"""Batches of exactly `batch_size` sequences: form them, find the causes if none can be formed, lease them to trainers.

Pure functions form them from the groups that wait and the order of these. The work and the memory of one call are
bounded, for all sizes: see WORK_BITS. No clock, no I/O.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

from ....._pipeline.accounting.telemetry import get_logger
from .records import Batch, UnknownLease
from .scheduling import PendingGroups, QueuedGroup

G = TypeVar("G")

MAX_BATCH_SIZE = 2**20

WORK_BITS = 2**26
"""Bits of all tables of one search: 8 MiB. Searches of 4,096 groups are complete up to a batch_size of 16,384; beyond
that they consider the first so many groups."""

LOOK_BACK_FACTOR = 4

CHECK_INTERVAL_S = 5.0
"""Time between two checks for stalls."""

LEASE_BITS = 53
"""Leases are random, so that those from before a restart are invalid; 53 bits are exact numbers in any JSON."""

log = get_logger("penstock.atropos.queue")


def form_batch(
    pending: PendingGroups[G],
    in_turn: Callable[[], Iterable[QueuedGroup[G]]],
    batch_size: int,
    minima: Mapping[int, int],
) -> list[QueuedGroup[G]] | None:
    """Return groups that sum to `batch_size`: the minimum of each lane, then the next in turn; None without such a sum.

    If no such sum holds the minima, they are ignored: a batch that holds less of one environment is better than none.
    There is no batch while a lane with a minimum has no group.
    """
    minima = {lane: wanted for lane, wanted in minima.items() if wanted > 0}
    if pending.sequences < batch_size or not minima.keys() <= pending.lanes.keys():
        return None
    first = _minima(pending, minima, batch_size)
    return _filled(first, in_turn(), batch_size) or (_filled([], in_turn(), batch_size) if first else None)


def _filled(
    first: list[QueuedGroup[G]], in_turn: Iterable[QueuedGroup[G]], batch_size: int
) -> list[QueuedGroup[G]] | None:
    """Return `first` and those of the others that make up a batch with it, or None."""
    taken = set(first)
    others: list[QueuedGroup[G]] = []

    def sizes() -> Iterator[int]:
        for queued in in_turn:
            if queued not in taken:
                others.append(queued)
                yield queued.sequences

    found = exact_subset(sizes(), batch_size - sum(queued.sequences for queued in first))
    return None if found is None else first + [others[index] for index in found]


def _minima(pending: PendingGroups[G], minima: Mapping[int, int], batch_size: int) -> list[QueuedGroup[G]]:
    """Return the oldest groups of each lane up to its minimum, leaving out those that no longer fit in a batch.

    Minima of more than a batch are scaled down together, each to a group at least.
    """
    total = sum(minima.values())
    taken: list[QueuedGroup[G]] = []
    missing = batch_size
    for lane, wanted in minima.items():
        own = pending.lanes[lane]
        goal = missing - (wanted if total <= batch_size else max(min(own.sizes), wanted * batch_size // total))
        for queued in own.groups.values():
            if missing <= goal:
                break
            if queued.sequences <= missing:
                taken.append(queued)
                missing -= queued.sequences
    return taken


def exact_subset(sizes: Iterable[int], wanted: int) -> list[int] | None:
    """Return indices of sizes that sum to `wanted`, or None: the first if possible, then the next, and so on.

    1. Take each size from the front that fits. In most cases this sums to `wanted`, and the search is over.
    2. Otherwise give up the last that was taken, then 4 more, then 16 more, …, until others make up the rest.
       The first search that succeeds is over a small sum, so it needs small tables.

    >>> exact_subset([7, 3, 3, 5], 8)
    [1, 3]
    """
    seen: list[int] = []
    chosen: list[int] = []
    missing = wanted
    for index, size in enumerate(sizes if wanted else ()):
        seen.append(size)
        if size <= missing:
            chosen.append(index)
            missing -= size
        if not missing:
            break
    return _exchanged(seen, chosen, missing) if missing else chosen


def _exchanged(sizes: list[int], chosen: list[int], missing: int) -> list[int] | None:
    """Return as many of the first `chosen` indices as can stay, and others that make up the rest."""
    if missing > sum(sizes) - sum(sizes[index] for index in chosen):
        return None
    given_up = 1
    while chosen:
        chosen, rest = chosen[:-given_up], chosen[-given_up:]
        missing += sum(sizes[index] for index in rest)
        found = _search(sizes, rest[0], missing)
        if found is not None:
            return chosen + found
        given_up *= LOOK_BACK_FACTOR
    return None


def _search(sizes: list[int], start: int, wanted: int) -> list[int] | None:
    """Return the first indices from `start` whose sizes sum to `wanted`, or None."""
    usable = _usable(sizes, start, wanted)
    reached = [1]
    """Bit n of number i is 1 if some of the last i usable sizes sum to n."""
    within = (1 << wanted + 1) - 1
    for index in reversed(usable):
        reached.append((reached[-1] | reached[-1] << sizes[index]) & within)
    if not reached.pop() >> wanted:
        return None
    found = []
    for index in usable:
        after = reached.pop()
        if sizes[index] <= wanted and after >> wanted - sizes[index] & 1:
            found.append(index)
            wanted -= sizes[index]
    return found


def _usable(sizes: list[int], start: int, wanted: int) -> list[int]:
    """Return indices of the first groups: of each size no more than fit into `wanted`, in all at most WORK_BITS."""
    counts: Counter[int] = Counter()
    usable: list[int] = []
    for index in range(start, len(sizes)):
        if len(usable) * wanted > WORK_BITS:
            break
        if counts[sizes[index]] < wanted // sizes[index]:
            counts[sizes[index]] += 1
            usable.append(index)
    return usable


@lru_cache(maxsize=16)
def unpackable(sizes: frozenset[int], batch_size: int) -> frozenset[int]:
    """Return those of `sizes` that are in no batch, however many groups of each come.

    Of many sizes with a large `batch_size` (see WORK_BITS) only those that are larger than it.

    >>> sorted(unpackable(frozenset({3, 4}), 8)), sorted(unpackable(frozenset({1, 3, 4}), 8))
    ([3], [])
    """
    if len(sizes) * batch_size > WORK_BITS:
        return frozenset(size for size in sizes if size > batch_size)
    sums = _sums(sizes, batch_size)
    return frozenset(size for size in sizes if size > batch_size or not sums >> batch_size - size & 1)


def _sums(sizes: Iterable[int], most: int) -> int:
    """Return a number whose bit n is 1 if sizes, each any number of times, sum to n."""
    reached, within = 1, (1 << most + 1) - 1
    for size in sorted(sizes):
        step, redundant = size, reached >> size & 1
        while step <= most and not redundant:
            reached |= reached << step & within
            step *= 2
    return reached


class StallDetector:
    """Logs each stall once when two checks found it, and once when it is resolved; most waits are short."""

    def __init__(self) -> None:
        self._due = -math.inf
        self._seen: set[str] = set()
        """At the last check."""
        self._logged: set[str] = set()

    def check(self, now: float, stalls: Callable[[], Iterable[str]]) -> None:
        """Check for stalls if CHECK_INTERVAL_S has passed since the last check."""
        if now < self._due:
            return
        self._due = now + CHECK_INTERVAL_S
        before, self._seen = self._seen, {*stalls()}
        for reason in sorted(self._seen & before - self._logged):
            log.warning("stalled", reason=reason)
        for reason in sorted(self._logged - self._seen):
            log.info("stall_resolved", reason=reason)
        self._logged = self._seen & (before | self._logged)


# -- leases ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class PreparedBatch(Generic[G]):
    """A batch that was formed and is not acknowledged."""

    number: int
    """Its place in the order of forming."""
    batch_id: str
    groups: list[QueuedGroup[G]]
    due: float = math.inf
    """Time at which its lease ends. It may still be acknowledged until it is leased again."""

    @property
    def sequences(self) -> int:
        """Return the number of sequences of all groups."""
        return sum(queued.sequences for queued in self.groups)

    def batch(self, lease: int) -> Batch[G]:
        """Return it as a trainer gets it."""
        return Batch(tuple(queued.submission for queued in self.groups), lease, self.batch_id)


class LeaseTable(Generic[G]):
    """The batches that trainers have: each under one lease, until it is acknowledged or leased again."""

    def __init__(self) -> None:
        self._leased: dict[int, PreparedBatch[G]] = {}

    def __len__(self) -> int:
        return len(self._leased)

    def lend(self, prepared: PreparedBatch[G], due: float) -> Batch[G]:
        """Return the batch under a new lease."""
        lease = secrets.randbits(LEASE_BITS)
        prepared.due = due
        self._leased[lease] = prepared
        return prepared.batch(lease)

    def acknowledge(self, lease: int) -> PreparedBatch[G]:
        """End the lease and return its batch.

        Raises:
            UnknownLease: it does not exist.
        """
        if lease not in self._leased:
            raise UnknownLease(
                f"expected the lease of an outstanding batch, got {lease}: it was acknowledged before, or was not in "
                f"time and the batch was leased again"
            )
        return self._leased.pop(lease)

    def return_batch(self, lease: int) -> None:
        """Make the batch due at once, if this lease still exists."""
        if lease in self._leased:
            self._leased[lease].due = -math.inf

    def pop_due(self, now: float) -> PreparedBatch[G] | None:
        """End the lease of the earliest batch that is due, and return that batch."""
        due = [lease for lease, prepared in self._leased.items() if prepared.due <= now]
        return self._leased.pop(min(due, key=lambda lease: self._leased[lease].number)) if due else None
