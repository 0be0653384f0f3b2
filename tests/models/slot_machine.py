"""`SlotTable` against an array of owners."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.models.explore import Broken, hold
from tests.models.machine import PICKS, any_of

from penstock._pipeline.channels.slots import SlotTable, Span
from penstock.errors import IllegalTransition, PenstockError, RecordTooLarge, StaleDescriptor

__all__ = ["SLOT_RULES", "SlotMachine"]

SLOTS = 8

FIRST_FIT = "a span is adjacent free slots, the first that there are"
OWNERS = "every slot has the owner that allocated it, or none"
GENERATIONS = "each use of a first slot is its next generation"
REFUSED = "a step that the state of a span does not allow is refused and changes nothing"
STALE = "a release of another generation is refused and changes nothing"
NEVER = "a span that can never be allocated is an error"

SLOT_RULES = (FIRST_FIT, OWNERS, GENERATIONS, REFUSED, STALE, NEVER)


class SlotMachine(RuleBasedStateMachine):
    """Records are written, published, abandoned and released in any order, and some steps are not allowed."""

    table: Callable[[int], SlotTable] = SlotTable

    def __init__(self) -> None:
        super().__init__()
        self.real = type(self).table(SLOTS)
        self.owners: list[Span | None] = [None] * SLOTS
        self.uses = [0] * SLOTS
        self.writing: list[Span] = []
        self.published: list[Span] = []
        self.ended: list[tuple[int, int]] = []
        """(slot, generation) of freed spans."""
        self.sequence = 0
        self.held: dict[int, int] = {}
        """Unreleased records of the span that begins at a slot."""

    @rule(count=st.integers(1, SLOTS), more=st.integers(0, 3))
    def allocate(self, count: int, more: int) -> None:
        free = [start for start in range(SLOTS - count + 1) if self.owners[start : start + count] == [None] * count]
        span = self.real.allocate(count, count + more)
        place = None if span is None else (span.start, span.count)
        while free and more and self.owners[free[0] + count : free[0] + count + 1] == [None]:
            count, more = count + 1, more - 1
        hold(FIRST_FIT, place == ((free[0], count) if free else None), f"{place} of {free} for {count}")
        if span is not None:
            self.uses[span.start] += 1
            hold(GENERATIONS, span.generation == self.uses[span.start], span)
            self.owners[span.start : span.start + count] = [span] * count
            self.writing.append(span)

    @precondition(lambda self: self.writing)
    @rule(pick=PICKS, fewer=st.integers(0, 3))
    def trim(self, pick: int, fewer: int) -> None:
        span = any_of(self.writing, pick)
        keeps = max(1, span.count - fewer)
        end = span.start + span.count
        hold(OWNERS, self.real.trim(span, keeps) == end - span.start - keeps, span)
        hold(OWNERS, span.count == keeps, span)
        self.owners[span.start + keeps : end] = [None] * (end - span.start - keeps)

    @rule(beyond=st.integers(1, 3))
    def allocate_too_much(self, beyond: int) -> None:
        self._refused(NEVER, RecordTooLarge, self.real.allocate, SLOTS + beyond)

    @precondition(lambda self: self.writing)
    @rule(pick=PICKS, records=st.integers(1, 3))
    def publish(self, pick: int, records: int) -> None:
        span = any_of(self.writing, pick)
        self.sequence += records
        self.real.publish(span, self.sequence, records)
        hold(OWNERS, (span.state, span.sequence) == ("published", self.sequence), span)
        self.writing.remove(span)
        self.published.append(span)
        self.held[span.start] = records

    @precondition(lambda self: self.published)
    @rule(pick=PICKS, records=st.integers(1, 3))
    def release(self, pick: int, records: int) -> None:
        span = any_of(self.published, pick)
        records = min(records, self.held[span.start])
        try:
            returned = self.real.release(span.start, span.generation, records)
        except PenstockError as error:
            raise Broken(OWNERS, f"{records} of {span} are held, and cannot be released: {error}") from error
        hold(OWNERS, returned is span, f"{returned} for {span}")
        self.held[span.start] -= records
        if not self.held[span.start]:
            self.published.remove(span)
            self._end(span)

    @precondition(lambda self: self.published)
    @rule(pick=PICKS, beyond=st.integers(1, 3))
    def release_more_than_are_held(self, pick: int, beyond: int) -> None:
        span = any_of(self.published, pick)
        for records in (self.held[span.start] + beyond, 1 - beyond):
            self._refused(STALE, StaleDescriptor, self.real.release, span.start, span.generation, records)

    def _end(self, span: Span) -> None:
        hold(OWNERS, span.state == "free", span)
        self.ended.append((span.start, span.generation))
        self.owners = [None if owner is span else owner for owner in self.owners]

    @precondition(lambda self: self.ended)
    @rule(pick=PICKS)
    def release_again(self, pick: int) -> None:
        self._refused(STALE, StaleDescriptor, self.real.release, *any_of(self.ended, pick))

    @rule(start=st.integers(-1, SLOTS), generation=st.integers(-1, 4))
    def release_what_never_was(self, start: int, generation: int) -> None:
        if all((span.start, span.generation) != (start, generation) for span in self.writing + self.published):
            self._refused(STALE, StaleDescriptor, self.real.release, start, generation)

    @precondition(lambda self: self.writing)
    @rule(pick=PICKS)
    def release_what_is_being_written(self, pick: int) -> None:
        span = any_of(self.writing, pick)
        self._refused(REFUSED, IllegalTransition, self.real.release, span.start, span.generation)

    @precondition(lambda self: self.published)
    @rule(pick=PICKS)
    def publish_or_trim_what_is_published(self, pick: int) -> None:
        span = any_of(self.published, pick)
        self._refused(REFUSED, IllegalTransition, self.real.publish, span, self.sequence)
        self._refused(REFUSED, IllegalTransition, self.real.trim, span, 1)

    def _refused(self, name: str, error: type[PenstockError], step: Callable[..., Any], *arguments: Any) -> None:
        try:
            step(*arguments)
        except error:
            return
        except PenstockError as other:
            raise Broken(name, f"{step.__name__}{arguments}: {type(other).__name__}: {other}") from other
        raise Broken(name, f"{step.__name__}{arguments} was taken")

    @invariant()
    def agrees(self) -> None:
        spans = self.writing + self.published
        hold(OWNERS, self.real.live == len(spans), f"{self.real!r}, but {spans}")
        hold(OWNERS, self.real.free_slots == self.owners.count(None), f"{self.real!r}, but {self.owners}")
        hold(REFUSED, all(span.state == "writing" for span in self.writing), self.writing)
        hold(STALE, all(span.state == "published" for span in self.published), self.published)
