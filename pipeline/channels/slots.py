"""The ownership of slots: the producer's table, sans-I/O.

A slot is a fixed-size cell of a segment. A bundle of records takes a *span* of adjacent slots, first fit, the lowest
address first, so that a small hot set of slots is used again and again and stays in the cache. Only the producer
allocates in its own segment, so there is no lock for a killed process to leave locked.

    free ──allocate──▶ writing ──publish──▶ published ──release of every record──▶ free
                          └──trim (of its end)──▶ free
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..errors import IllegalTransition, RecordTooLarge, StaleDescriptor

SpanState: TypeAlias = Literal["writing", "published", "free"]

HISTORY_LENGTH = 8
"""Transitions of a slot that are remembered, for the message of an illegal one."""


@dataclass(slots=True)
class Span:
    """Adjacent slots that hold, or held, one bundle."""

    start: int
    """First slot."""
    count: int
    """Slots."""
    generation: int
    """Allocations of the first slot up to that of this span."""
    state: SpanState = "writing"
    sequence: int = 0
    """The last record's number among the sender's; 0 until it is published."""
    records: int = 0
    """Records that the reader still holds."""


class SlotTable:
    """The ownership of `slots` slots."""

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"expected at least 1 slot, got {slots}")
        self.slots = slots
        self._free: list[tuple[int, int]] = [(0, slots)]
        """Free runs as (first slot, slots), in order of address, never adjacent."""
        self._live: dict[int, Span] = {}
        """Spans in use, by first slot."""
        self._generations: defaultdict[int, int] = defaultdict(int)
        self._histories: defaultdict[int, deque[tuple[str, int]]] = defaultdict(lambda: deque(maxlen=HISTORY_LENGTH))
        """The transitions of each slot, as (transition, generation or sequence); formatted only for an error."""

    def __repr__(self) -> str:
        return f"<SlotTable: {self.slots - self.free_slots} of {self.slots} slots in {len(self._live)} spans>"

    @property
    def live(self) -> int:
        """Return the number of spans that are not free."""
        return len(self._live)

    @property
    def free_slots(self) -> int:
        """Return the number of slots that no span uses."""
        return sum(count for _, count in self._free)

    def allocate(self, count: int, most: int = 0) -> Span | None:
        """Return a span of `count` slots in state writing, or None while no free run is that long.

        Where `most` is larger, the span takes as many as the run has, up to that; `trim` frees those not needed.

        Raises:
            RecordTooLarge: there are not that many slots.
        """
        if count > self.slots:
            raise RecordTooLarge(f"expected a span of at most {self.slots} slots, got one of {count}")
        for index, (start, length) in enumerate(self._free):
            if length >= count:
                taken = min(length, max(count, most))
                if taken == length:
                    del self._free[index]
                else:
                    self._free[index] = (start + taken, length - taken)
                return self._open(start, taken)
        return None

    def _open(self, start: int, count: int) -> Span:
        generation = self._generations[start] = self._generations[start] + 1
        span = self._live[start] = Span(start, count, generation)
        self._histories[start].append(("allocated as generation", generation))
        return span

    def trim(self, span: Span, count: int) -> int:
        """Keep the first `count` slots of `span`, still being written; return the number of those freed.

        Raises:
            IllegalTransition: the span is not being written.
            ValueError: it has fewer, or `count` is 0.
        """
        self._expect(span, "writing", "trim")
        if not 0 < count <= span.count:
            raise ValueError(f"expected to keep 1 to {span.count} slots of {span}, got {count}")
        given_back, span.count = span.count - count, count
        if given_back:
            self._return(span.start + count, given_back)
        return given_back

    def publish(self, span: Span, sequence: int, records: int = 1) -> None:
        """Publish `span`, with `records` up to number `sequence`; it belongs to the reader until each is released.

        Raises:
            IllegalTransition: the span is not being written.
        """
        self._expect(span, "writing", "publish")
        span.state, span.sequence, span.records = "published", sequence, records
        self._histories[span.start].append(("published as record", sequence))

    def release(self, start: int, generation: int, records: int = 1) -> Span:
        """Release `records` more of the span that begins at slot `start`; with the last one, free it.

        Spans are released in any order.

        Raises:
            StaleDescriptor: the slot is not in that generation, or holds fewer records: a late or forged release.
            IllegalTransition: the span is not published.
        """
        span = self._live.get(start)
        if span is None or span.generation != generation:
            now = "free" if span is None else f"in generation {span.generation}"
            raise StaleDescriptor(
                f"release of slot {start}, generation {generation}, but the slot is {now}; {self._history(start)}"
            )
        self._expect(span, "published", "release")
        if not 0 < records <= span.records:
            raise StaleDescriptor(
                f"release of {records} records in slot {start}, generation {generation}, but {span.records} are held; "
                f"{self._history(start)}"
            )
        span.records -= records
        if not span.records:
            del self._live[start]
            span.state = "free"
            self._histories[start].append(("released in generation", generation))
            self._return(start, span.count)
        return span

    def _return(self, start: int, count: int) -> None:
        """Add slots to the free runs."""
        index = bisect_left(self._free, (start, 0))
        if index < len(self._free) and self._free[index][0] == start + count:
            count += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == start:
            start, before = self._free[index - 1]
            self._free[index - 1] = (start, before + count)
        else:
            self._free.insert(index, (start, count))

    def _expect(self, span: Span, state: SpanState, transition: str) -> None:
        if span.state != state:
            raise IllegalTransition(
                f"cannot {transition} slot {span.start}: expected state {state}, got {span.state}; "
                f"{self._history(span.start)}"
            )

    def _history(self, start: int) -> str:
        history = ", ".join(f"{transition} {number}" for transition, number in self._histories[start])
        return f"its history: {history or 'never used'}"
