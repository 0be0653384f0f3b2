"""Bundles in transit, small enough for an exhaustive search, around the real `SlotTable`.

One producer with a segment of three slots places records, which share a span where they can; a bundle is written and
published when it is complete, at the latest with the flush; each record is read and let go by itself, in any order, and
the slots are free when the last of a bundle is. The producer may be killed between any two steps: what it had published
is recovered. What a `Bundler` does around the table is what `SlotWriter`, `SlotReader` and `RemoteReceiver` do. Several
producers, restarts and the accounting are the subject of `channel_model`, whose rules these are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from tests.models.channel_model import BELIEVED, BYTES, CREDIT, DELIVERED, FREED, LATE, ONCE, ONE_OWNER, SLOTS
from tests.models.explore import Broken, Moments, Step, explore, hold

from penstock._pipeline.channels.slots import SlotTable, Span
from penstock.errors import PenstockError, StaleDescriptor

__all__ = ["RULES", "Bundler", "search"]

RULES = (ONE_OWNER, ONCE, BYTES, BELIEVED, LATE, CREDIT, DELIVERED, FREED)

MOST = 3
"""Records in a bundle."""


class Header(NamedTuple):
    """The header of a published bundle in its segment, and its descriptor."""

    sequence: int
    """Sequence number of its last record."""
    records: int
    slot: int
    slots: int
    generation: int


class Lease(NamedTuple):
    """One record that is read."""

    record: int
    bundle: Header


class Bundler:
    """A producer's process, its segment, and the receiver's state of it. The step methods change it."""

    def __init__(self, halves: tuple[int, ...], table: type[SlotTable] = SlotTable) -> None:
        self.halves = halves
        """Half slots of each record."""
        # The producer's process:
        self.alive = True
        self.table = table(SLOTS)
        self.placed = 0
        """Records that were received."""
        self.writing: Span | None = None
        self.filled: list[int] = []
        """Half slots of each record of the bundle that is being filled."""
        self.ready: list[Header] = []
        self.spans: dict[tuple[int, int], Header] = {}
        """Bundles in flight, by first slot and generation."""
        self.closed: set[tuple[int, int]] = set()
        # The segment:
        self.headers: dict[int, Header] = {}
        self.contents: list[int] = [0] * SLOTS
        """The last record of the bundle that was written to each slot."""
        # The sockets:
        self.wire: list[Header] = []
        self.back: list[tuple[int, int]] = []
        # The receiver's process:
        self.sequence = 0
        self.arrivals: list[Header] = []
        self.taken = 0
        """Records of the first bundle that were taken."""
        self.leases: list[Lease] = []
        self.delivered: list[int] = []
        self.noticed = False

    def steps(self) -> Iterator[Step]:
        """Yield the steps that are possible next."""
        if self.alive:
            if self.placed < len(self.halves):
                yield ("place",)
            if self.writing is not None or self.ready:
                yield ("flush",)
            if self.back:
                yield ("receive",)
            for wire_type in range(len(self.wire) + 1):
                yield "crash", wire_type
        elif not self.noticed:
            yield ("notice",)
        if self.wire:
            yield ("drain",)
        if self.arrivals:
            yield ("take",)
        for index in range(len(self.leases)):
            yield "release", index

    # -- the producer ------------------------------------------------------------------------------------------------

    def place(self) -> None:
        """Add a record to the open bundle, or begin one, or find no room."""
        size = self.halves[self.placed]
        if self.writing is None or not self._joins(self.writing, size):
            self.complete()
            self.writing = self.table.allocate(-(-size // 2), min(SLOTS, -(-size * MOST // 2)))
            if self.writing is None:
                return
        self.filled.append(size)
        self.placed += 1
        if len(self.filled) == MOST:
            self.complete()

    def _joins(self, span: Span, size: int) -> bool:
        return sum(self.filled) + size <= 2 * span.count

    def complete(self) -> None:
        """Write the bundle, then publish it."""
        span, self.writing = self.writing, None
        if span is None:
            return
        records, slots, self.filled = len(self.filled), -(-sum(self.filled) // 2), []
        self.write(span.start, slots)
        self.table.trim(span, slots)
        header = Header(self.placed, records, span.start, span.count, span.generation)
        self.table.publish(span, self.placed, records)
        self.headers[span.start] = self.spans[span.start, span.generation] = header
        self.ready.append(header)

    def write(self, start: int, slots: int) -> None:
        """Copy all its columns."""
        self.contents[start : start + slots] = [self.placed] * slots

    def flush(self) -> None:
        """Send all descriptors."""
        self.complete()
        self.wire += self.ready
        self.ready = []

    def receive(self) -> None:
        """Receive the release of one record."""
        slot, generation = self.back.pop(0)
        try:
            span = self.table.release(slot, generation)
        except PenstockError as error:
            raise Broken(BELIEVED, f"release: {type(error).__name__}: {error}") from error
        if not span.records:
            del self.headers[slot], self.spans[slot, generation]
            self.closed.add((slot, generation))

    def crash(self, wire_type: int) -> None:
        """Kill the producer: the socket delivers a part of its messages, or all."""
        self.alive = False
        self.wire = self.wire[:wire_type]
        self.ready, self.back = [], []

    # -- the receiver ------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Receive a descriptor."""
        self.arrive(self.wire.pop(0))

    def arrive(self, bundle: Header) -> None:
        """Check that it follows the descriptor before, or refuse it."""
        hold(BELIEVED, bundle.sequence == self.sequence + bundle.records, f"{bundle} came after {self.sequence}")
        self.sequence = bundle.sequence
        self.arrivals.append(bundle)

    def take(self) -> None:
        """Deliver the next record of the first bundle."""
        bundle = self.arrivals[0]
        hold(BELIEVED, self.headers.get(bundle.slot) == bundle, f"{bundle}, but {self.headers.get(bundle.slot)}")
        record = bundle.sequence - bundle.records + 1 + self.taken
        hold(ONCE, record not in self.delivered, f"record {record}")
        self.delivered.append(record)
        self.leases.append(Lease(record, bundle))
        self.taken += 1
        if self.taken == bundle.records:
            self.taken = 0
            self.arrivals.pop(0)

    def release(self, index: int) -> None:
        """End the last view on a record; others of its bundle may still be read."""
        lease = self.leases.pop(index)
        if self.alive:
            self.back.append((lease.bundle.slot, lease.bundle.generation))

    def notice(self) -> None:
        """Handle the closed connection: receive the rest of the socket, then the published records beyond it."""
        self.noticed = True
        while self.wire:
            self.drain()
        for bundle in self.recover(self.sequence):
            self.arrive(bundle)

    def recover(self, sequence: int) -> list[Header]:
        """Return the records that were published beyond record `sequence`."""
        return sorted(header for header in self.headers.values() if header.sequence > sequence)

    # -- what must hold ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check the rules that hold in every state."""
        for record, bundle in self.leases:
            held = self.contents[bundle.slot : bundle.slot + bundle.slots]
            hold(BYTES, set(held) == {bundle.sequence}, f"record {record} of {bundle} shows {held}")
        if self.alive:
            self._check_owners()
            self._check_credit()
            self._check_late_releases()

    def _check_owners(self) -> None:
        spans = [(bundle.slot, bundle.slots) for bundle in self.spans.values()]
        if self.writing is not None:
            spans.append((self.writing.start, self.writing.count))
        slots = [slot for start, count in spans for slot in range(start, start + count)]
        hold(ONE_OWNER, len(slots) == len(set(slots)) <= SLOTS, spans)
        known = self.table.live, self.table.free_slots
        hold(ONE_OWNER, known == (len(spans), SLOTS - len(slots)), f"{self.table!r}, but {spans}")

    def _check_credit(self) -> None:
        held: Counter[tuple[int, int]] = Counter()
        for bundle in [*self.ready, *self.wire, *self.arrivals]:
            held[bundle.slot, bundle.generation] += bundle.records
        if self.arrivals:
            held[self.arrivals[0].slot, self.arrivals[0].generation] -= self.taken
        for _, bundle in self.leases:
            held[bundle.slot, bundle.generation] += 1
        held.update(self.back)
        counted = Counter({(slot, span.generation): span.records for slot, span in self.table._live.items()})
        hold(CREDIT, held == counted, f"{counted} counted, {held} somewhere")

    def _check_late_releases(self) -> None:
        before = self.table.live, self.table.free_slots
        for start, generation in sorted(self.closed):
            try:
                self.table.release(start, generation)
            except StaleDescriptor:
                hold(LATE, (self.table.live, self.table.free_slots) == before, self.table)
            else:
                raise Broken(LATE, f"slot {start} was released in generation {generation}, long after that had ended")

    def check_rest(self) -> None:
        """Check the rules that hold when no step is possible but faults."""
        published = self.placed - len(self.filled)
        hold(DELIVERED, self.delivered == list(range(1, published + 1)), f"{self.delivered} of {published}")
        if self.alive:
            hold(DELIVERED, published == len(self.halves), f"{published} of {len(self.halves)} were published")
            hold(FREED, self.table.free_slots == SLOTS, self.table)


def search(halves: tuple[int, ...], bundler: type[Bundler] = Bundler, table: type[SlotTable] = SlotTable) -> int:
    """Check every state that is reachable with records of these sizes; return their number.

    Raises:
        Broken: a rule does not hold in one of them.
    """
    moments: Moments[Bundler] = Moments()

    def steps(moment: int) -> Iterator[tuple[object, int]]:
        for step in moments[moment].steps():
            yield step, moments.after(moment, step)[0]

    def check(moment: int) -> None:
        each = moments[moment]
        each.check()
        if all(step[0] == "crash" for step in each.steps()):
            each.check_rest()

    return len(explore(moments.first(lambda: bundler(halves, table)), steps, check))
