"""A channel between processes, small enough for an exhaustive search, around the real `SlotTable` and `Ledger`.

Two producers with a segment of three slots each send to one receiver. A producer writes, publishes and flushes; its
descriptors travel in order; the receiver leases, trains, and lets go in any order; releases travel back. Any producer
may be killed between any two steps, with what its socket had not carried yet, and is started anew with a segment of its
own; the receiver may be killed as well. What a `Line` does around the table is what `SlotWriter`, `SenderConnection`
and `RemoteReceiver` do, without their sockets; the accounting is what `WorkerAccounting` does around the
ledger.

A rule is checked in every state; RULES lists them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import NamedTuple

from tests.models.explore import Broken, Moments, Step, explore, hold

from penstock import TrainBatch, TrajectoryGroup
from penstock._pipeline.accounting.end_states import EndState
from penstock._pipeline.channels.slots import SlotTable, Span
from penstock.accounting import Ledger
from penstock.errors import LedgerImbalance, PenstockError, StaleDescriptor
from penstock.testing import group

__all__ = ["RULES", "Channel", "Line"]

SLOTS = 3

ONE_OWNER = "no slot has two owners"
ONCE = "no record is delivered twice"
BYTES = "a delivered record equals the written one, as long as it is held"
BELIEVED = "no message of a correct process is refused"
LATE = "a late release is refused and changes nothing"
CREDIT = "credit is conserved: every record that the sender counts in flight exists"
BALANCE = "the ledger balances"
TRUTH = "the ledger agrees with the events"
DELIVERED = "at rest, every published record is delivered, or its receiver died and that is reported"
FREED = "at rest, every slot is free"
ENDED = "at rest, every trajectory has ended"

RULES = (ONE_OWNER, ONCE, BYTES, BELIEVED, LATE, CREDIT, BALANCE, TRUTH, DELIVERED, FREED, ENDED)


class Header(NamedTuple):
    """The header of the span that begins at a slot."""

    published: bool
    sequence: int
    slots: int
    generation: int


class Descriptor(NamedTuple):
    """The location of a record, as it is sent."""

    sequence: int
    slot: int
    slots: int
    generation: int


def expected(function_of: str, error: Exception) -> Broken:
    """A step of a correct process was refused."""
    return Broken(BELIEVED, f"{function_of}: {type(error).__name__}: {error}")


class Line:
    """One connection: a producer's process, its segment, and the receiver's state of them.

    The step methods change it, and return the change of the accounting: an operation of `_Accounting` without its
    worker.
    """

    def __init__(self, sizes: tuple[int, ...], table: type[SlotTable] = SlotTable, *, copies: bool = False) -> None:
        self.sizes = sizes
        """Slots of each record to send, in order."""
        self.copies = copies
        """True if the receiver releases a record when it is trained; else either may be first, in more states."""
        # The producer's process:
        self.alive = True
        self.table = table(SLOTS)
        self.writing: Span | None = None
        self.sent = 0
        self.spans: dict[int, Span] = {}
        """Spans in flight by sequence number."""
        self.closed: set[tuple[int, int]] = set()
        """(slot, generation) of every span that was returned."""
        self.outgoing: list[Descriptor] = []
        """Descriptors that the next flush sends."""
        # The segment, which outlives the process:
        self.headers: list[Header | None] = [None] * SLOTS
        self.contents = [0] * SLOTS
        """The record whose bytes are in each slot."""
        # The sockets:
        self.wire: list[Descriptor] = []
        self.back: list[tuple[int, int]] = []
        # The receiver's process:
        self.receiver_alive = True
        """True while the receiver lives."""
        self.sequence = 0
        """The last record that arrived."""
        self.arrivals: list[Descriptor] = []
        self.leases: list[Descriptor] = []
        self.untrained: list[int] = []
        self.delivered: list[int] = []
        self.noticed = False
        """True once the producer's death was noticed."""
        self.settled = False
        """True once the producer's records are settled: it sends nothing more."""

    def steps(self) -> Iterator[Step]:
        """Yield the steps that are possible next, without faults."""
        if self.alive:
            yield from self._steps_of_the_producer()
        if self.receiver_alive:
            yield from self._steps_of_the_receiver()

    def _steps_of_the_producer(self) -> Iterator[Step]:
        if self.writing is not None:
            yield ("publish",)
        elif not self.receiver_alive:
            if not self.settled:
                yield ("learn",)
            return
        elif self.sent < len(self.sizes) and self._has_room():
            yield ("write",)
        if self.outgoing:
            yield ("flush",)
        if self.back:
            yield ("receive",)

    def _has_room(self) -> bool:
        """Return whether there is a run of free slots for the next record, without asking the table."""
        taken = {slot for span in self.spans.values() for slot in _slots(span)}
        size = self.sizes[self.sent]
        return any(not taken & set(range(start, start + size)) for start in range(SLOTS - size + 1))

    def _steps_of_the_receiver(self) -> Iterator[Step]:
        if self.wire:
            yield ("drain",)
        if self.arrivals:
            yield ("take",)
        for index in range(len(self.leases)):
            yield "release", index
        for sequence in () if self.copies else self.untrained:
            yield "train", sequence
        if not self.alive and not self.noticed:
            yield ("notice",)
        if self.noticed and not self.arrivals and not self.settled:
            yield ("settle",)

    def faults(self) -> Iterator[Step]:
        """Yield the ways to kill the producer's process: a socket delivers a part of its messages, or all."""
        if self.alive:
            for wire_type in range(len(self.wire) + 1) if self.receiver_alive else [0]:
                yield "crash", wire_type

    # -- the producer ------------------------------------------------------------------------------------------------

    def write(self) -> Step:
        """Allocate a span, and copy the record into it."""
        size = self.sizes[self.sent]
        span = self.table.allocate(size)
        if span is None:
            raise Broken(FREED, f"no span of {size} slots, and {self.table.free_slots} slots are free, side by side")
        self.writing = span
        self.headers[span.start] = Header(False, 0, size, span.generation)
        self._copy(span)
        return "admit", self.sent + 1

    def _copy(self, span: Span) -> None:
        self.contents[span.start : span.start + span.count] = [self.sent + 1] * span.count

    def publish(self) -> None:
        """Publish the record, which is the receiver's from now on; its descriptor waits for the next flush."""
        span, self.writing = self.writing, None
        assert span is not None
        self.sent += 1
        self.table.publish(span, self.sent)
        self.headers[span.start] = Header(True, self.sent, span.count, span.generation)
        self.spans[self.sent] = span
        self.outgoing.append(Descriptor(self.sent, span.start, span.count, span.generation))

    def flush(self) -> None:
        """Send the descriptors."""
        self.wire += self.outgoing
        self.outgoing = []

    def receive(self) -> None:
        """Receive a release."""
        start, generation = self.back.pop(0)
        try:
            span = self.table.release(start, generation)
        except PenstockError as error:
            raise expected("release", error) from error
        self.headers[start] = None
        del self.spans[span.sequence]
        self.closed.add((start, generation))

    def learn(self) -> None:
        """Let the producer notice the receiver's death: releases in transit are lost."""
        self.settled = True

    def crash(self, wire_type: int) -> None:
        """Kill the producer."""
        self.alive = False
        self.wire = self.wire[:wire_type]
        self.outgoing, self.back = [], []

    # -- the receiver ------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Receive a descriptor."""
        self._arrive(self.wire.pop(0))

    def _arrive(self, descriptor: Descriptor) -> None:
        hold(BELIEVED, descriptor.sequence == self.sequence + 1, f"{descriptor} came after record {self.sequence}")
        self.sequence = descriptor.sequence
        self.arrivals.append(descriptor)

    def take(self) -> Step:
        """Deliver a record: its header agrees, or it is refused."""
        descriptor = self.arrivals.pop(0)
        sequence, slot, slots, generation = descriptor
        header = self.headers[slot]
        hold(ONCE, sequence not in self.delivered, descriptor)
        hold(BELIEVED, header == Header(True, sequence, slots, generation), f"{descriptor}, but {header}")
        self.delivered = sorted([*self.delivered, sequence])
        self.untrained = sorted([*self.untrained, sequence])
        self.leases = sorted([*self.leases, descriptor])
        return "take", sequence

    def train(self, sequence: int) -> Step:
        """Commit the record, after an optimizer step with it."""
        self.untrained.remove(sequence)
        return "train", sequence

    def release(self, index: int) -> Step | None:
        """End the last view on a record; a dead producer receives no release."""
        lease = self.leases.pop(index)
        if self.alive:
            self.back.append((lease.slot, lease.generation))
        return self.train(lease.sequence) if self.copies else None

    def notice(self) -> None:
        """Handle the closed connection: receive the rest of the socket, then the published records beyond it."""
        self.noticed = True
        while self.wire:
            self.drain()
        for descriptor in self.recover(self.sequence):
            self.sequence = descriptor.sequence
            self.arrivals.append(descriptor)

    def recover(self, sequence: int) -> list[Descriptor]:
        """Return the records that were published beyond record `sequence`."""
        return sorted(
            Descriptor(header.sequence, slot, header.slots, header.generation)
            for slot, header in enumerate(self.headers)
            if header is not None and header.published and header.sequence > sequence
        )

    def settle(self) -> Step:
        """Settle the dead producer: all that it had published was received."""
        self.settled = True
        return ("close",)

    def receiver_dies(self) -> None:
        """Kill the receiver's process."""
        self.receiver_alive = False
        self.wire, self.back, self.arrivals, self.leases, self.untrained = [], [], [], [], []

    # -- what must hold ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check the rules that hold in every state."""
        for lease in self.leases:
            held = self.contents[lease.slot : lease.slot + lease.slots]
            hold(BYTES, set(held) == {lease.sequence}, f"{lease} shows bytes of {held}")
        if self.alive:
            self._check_owners()
            self._check_credit()
            self._check_late_releases()

    def _check_owners(self) -> None:
        spans = [*self.spans.values(), *([self.writing] if self.writing else [])]
        slots = [slot for span in spans for slot in _slots(span)]
        hold(ONE_OWNER, len(slots) == len(set(slots)), spans)
        known = self.table.live, self.table.free_slots
        hold(ONE_OWNER, known == (len(spans), SLOTS - len(slots)), f"{self.table!r}, but {spans}")

    def _check_credit(self) -> None:
        if self.receiver_alive:
            underway = [*self.outgoing, *self.wire, *self.arrivals, *self.leases]
            somewhere = [(each.slot, each.generation) for each in underway] + self.back
            counted = [(span.start, span.generation) for span in self.spans.values()]
            hold(CREDIT, sorted(somewhere) == sorted(counted), f"{counted} in flight, {somewhere} somewhere")

    def _check_late_releases(self) -> None:
        before = self.table.live, self.table.free_slots
        for start, generation in sorted(self.closed):
            try:
                self.table.release(start, generation)
            except StaleDescriptor:
                hold(LATE, (self.table.live, self.table.free_slots) == before, self.table)
            except PenstockError as error:
                raise Broken(LATE, error) from error
            else:
                raise Broken(LATE, f"slot {start} was released in generation {generation}, long after that had ended")

    def check_rest(self) -> None:
        """Check the rules that hold when no step is possible."""
        published = list(range(1, self.sent + 1))
        if self.receiver_alive:
            hold(DELIVERED, self.delivered == published, f"{self.delivered} of {published}")
            hold(FREED, not self.leases, self.leases)
            if self.alive:
                hold(FREED, self.table.free_slots == SLOTS, self.table)
                hold(DELIVERED, self.sent == len(self.sizes), f"{self.sent} of {len(self.sizes)} were sent")
        elif self.alive:
            hold(DELIVERED, self.settled, "the receiver died, and the producer does not know")


def _slots(span: Span) -> range:
    return range(span.start, span.start + span.count)


Worker = tuple[int, int]
"""The index of a producer, and the number of its restarts."""


@cache
def _record(worker: Worker, sequence: int) -> TrajectoryGroup:
    return group(completion_lengths=[1], prompt_length=1, instance_id=f"{worker}/{sequence}")


@cache
def _batch(worker: Worker, sequence: int) -> TrainBatch:
    return TrainBatch.pack([_record(worker, sequence)])


def _is_assigned(worker: Worker) -> bool:
    """Return whether a producer is told what to sample: then its records are in flight from the beginning.

    The records of the others are admitted as they arrive. Each kind is one of two producers.
    """
    place, _ = worker
    return place == 0


class _Accounting:
    """The ledger of the run, in the receiver's process, and a plain record of the events."""

    def __init__(self, ledger: type[Ledger] = Ledger) -> None:
        self.ledger: Ledger | None = ledger()
        """None once the receiver has died."""
        self.outcomes: dict[tuple[Worker, int], EndState | None] = {}
        """The end state of each admitted trajectory; None while it is in flight."""
        self.taken: set[tuple[Worker, int]] = set()
        """Trajectories that were received."""

    def admit(self, worker: Worker, sequence: int) -> None:
        """Begin to sample in a worker."""
        if self.ledger is not None and _is_assigned(worker):
            self.ledger.admit(_record(worker, sequence).id, [0])
            self.outcomes[worker, sequence] = None

    def take(self, worker: Worker, sequence: int) -> None:
        """Receive."""
        assert self.ledger is not None
        if not _is_assigned(worker):
            hold(ONCE, not self.ledger.hand_over(_record(worker, sequence)), f"{worker}, record {sequence}")
            self.outcomes[worker, sequence] = None
        self.taken.add((worker, sequence))

    def train(self, worker: Worker, sequence: int) -> None:
        """Commit."""
        assert self.ledger is not None
        try:
            self.ledger.commit(_batch(worker, sequence), 1)
        except LedgerImbalance as error:
            raise expected("commit", error) from error
        self.outcomes[worker, sequence] = "trained"

    def close(self, worker: Worker) -> None:
        """Settle a dead worker: all its records were received; what it was told to sample beyond them is lost."""
        assert self.ledger is not None
        for (owner, sequence), outcome in self.outcomes.items():
            if owner == worker and outcome is None and (owner, sequence) not in self.taken:
                self.ledger.end(_record(worker, sequence), "lost", "killed")
                self.outcomes[owner, sequence] = "lost"

    def receiver_dies(self) -> None:
        """Remove the ledger, with its process."""
        self.ledger = None
        self.taken = set()

    def check(self) -> None:
        """Check the rules that hold in every state."""
        if self.ledger is None:
            return
        balance, outcomes = self.ledger.balance(), list(self.outcomes.values())
        hold(BALANCE, balance.balanced and balance.in_flight >= 0, balance)
        found = balance.admitted, balance.in_flight, balance.ended["trained"], balance.ended["lost"]
        truth = len(outcomes), outcomes.count(None), outcomes.count("trained"), outcomes.count("lost")
        hold(TRUTH, found == truth, f"{balance}, but {truth} were admitted, in flight, trained and lost")

    def check_rest(self) -> None:
        """Check the rules that hold when no step is possible."""
        if self.ledger is not None:
            hold(ENDED, self.ledger.in_flight == 0, repr(self.ledger))


class State(NamedTuple):
    """A state of the whole channel: states of its parts."""

    lines: tuple[tuple[int, ...], ...]
    """For each producer, the lines of its processes, one after another."""
    accounting: int
    receiver: bool
    """True while the receiver lives."""


class Channel:
    """The model: the steps from one state to others."""

    def __init__(
        self,
        sizes: tuple[int, ...],
        sizes_after_restart: tuple[int, ...] = (),
        *,
        producers: int = 2,
        kills: int = 2,
        copies: bool = False,
        receiver_may_die: bool = True,
        table: type[SlotTable] = SlotTable,
        ledger: type[Ledger] = Ledger,
        line: type[Line] = Line,
    ) -> None:
        self._lines: Moments[Line] = Moments()
        self._accounting: Moments[_Accounting] = Moments()
        make = partial(line, table=table, copies=copies)
        self._firsts = [self._lines.first(partial(make, each)) for each in (sizes, sizes_after_restart) if each]
        """The first state of a line, by the number of restarts of its producer."""
        self._kills = kills
        self._receiver_may_die = receiver_may_die
        self._known: dict[int, list[tuple[Step, bool]]] = {}
        """The steps of each state of a line, and whether they are faults."""
        self._checked: set[int] = set()
        """States of the accounting that were checked."""
        accounting = self._accounting.first(partial(_Accounting, ledger))
        self.start = State(((self._firsts[0],),) * producers, accounting, receiver=True)

    def search(self) -> int:
        """Check every state; return their number.

        Raises:
            Broken: a rule does not hold in one of them.
        """
        return len(explore(self.start, self._steps, self._check))

    def _steps(self, state: State) -> Iterator[tuple[object, State]]:
        may_kill = self._killed(state) < self._kills
        for place, lines in enumerate(state.lines):
            for restart, line in enumerate(lines):
                worker = place, restart
                for step, fault in self._steps_of(line):
                    if may_kill or not fault:
                        yield (worker, step), self._after(state, worker, step)
            if self._may_restart(state, lines):
                yield (place, "restarts"), self._restarted(state, place)
        if state.receiver and self._receiver_may_die:
            yield "the receiver is killed", self._receiver_died(state)

    def _steps_of(self, line: int) -> list[tuple[Step, bool]]:
        """Return the next steps of a line, and whether they are faults; each state is checked once."""
        known = self._known.get(line)
        if known is None:
            self._lines[line].check()
            steps, faults = self._lines[line].steps(), self._lines[line].faults()
            known = self._known[line] = [(step, False) for step in steps] + [(fault, True) for fault in faults]
        return known

    def _after(self, state: State, worker: Worker, step: Step) -> State:
        place, restart = worker
        lines, accounting = state.lines[place], state.accounting
        line, found = self._lines.after(lines[restart], step)
        if found is not None:
            operation, *arguments = found
            accounting = self._accounting.after(accounting, (operation, worker, *arguments))[0]
        lines = (*lines[:restart], line, *lines[restart + 1 :])
        return State((*state.lines[:place], lines, *state.lines[place + 1 :]), accounting, state.receiver)

    def _killed(self, state: State) -> int:
        return sum(not self._lines[line].alive for lines in state.lines for line in lines)

    def _may_restart(self, state: State, lines: tuple[int, ...]) -> bool:
        return state.receiver and not self._lines[lines[-1]].alive and len(lines) < len(self._firsts)

    def _restarted(self, state: State, place: int) -> State:
        lines = (*state.lines[place], self._firsts[len(state.lines[place])])
        return State((*state.lines[:place], lines, *state.lines[place + 1 :]), state.accounting, state.receiver)

    def _receiver_died(self, state: State) -> State:
        lines = tuple(tuple(self._lines.after(line, ("receiver_dies",))[0] for line in each) for each in state.lines)
        return State(lines, self._accounting.after(state.accounting, ("receiver_dies",))[0], receiver=False)

    def _check(self, state: State) -> None:
        if state.accounting not in self._checked:
            self._accounting[state.accounting].check()
            self._checked.add(state.accounting)
        lines = [line for each in state.lines for line in each]
        if all(fault for line in lines for _, fault in self._steps_of(line)):
            for line in lines:
                self._lines[line].check_rest()
            self._accounting[state.accounting].check_rest()
