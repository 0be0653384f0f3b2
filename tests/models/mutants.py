"""Cores with one small fault each, and the rule that each of them breaks."""

# ruff: noqa: ARG002 (not to heed an argument may well be the fault)

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from tests.models import (
    accounting_machine,
    channel_model,
    group_buffer_machine,
    group_buffer_model,
    ledger_machine,
    memory_machine,
    slot_machine,
    waiting_machine,
)
from tests.models.accounting_machine import AssignedMachine, RelayMachine, SourceMachine
from tests.models.channel_model import Channel, Descriptor, Header, Line, State, Worker
from tests.models.explore import Step
from tests.models.group_buffer_faults import (
    BeginsAnew,
    ClosesBeforeItLeaves,
    EveryPieceIsGivenTime,
    EvictionsAreNotReported,
    ExpiresASecondLate,
    ExpiresOneAtATime,
    KeepsTheRest,
    KeepsTheSlot,
    LatePiecesAreLost,
    LatePiecesRenewTheirGroup,
    LeavesTooEarly,
    LeavesTwice,
    MergesCopies,
    NothingIsEvicted,
    RemembersForEver,
    RoomIsNotGivenBack,
    TakesCopiesForLate,
    TheLastLeaveFirst,
    TheNewestIsEvicted,
    TheRestOfAPieceIsLost,
    WaitsForMore,
)
from tests.models.group_buffer_machine import AssemblyMachine
from tests.models.ledger_faults import (
    AdmitsAgain,
    ArrivalsAreNotAdmitted,
    CommitsAgain,
    CommitsHalf,
    CommitsTheLastPiece,
    CopiesAreNotCounted,
    DeadWorkersAreForgotten,
    EndsCountTwice,
    EndsWhatHasEnded,
    FailedSendsCount,
    ForgetsWhatWasTrained,
    LosesNothing,
    SendsCopies,
    SuccessesAreForgotten,
    UnsentIsForgotten,
    UnsentIsNotAdmitted,
    UnsentMayBeAnothers,
)
from tests.models.ledger_machine import LedgerMachine
from tests.models.machine import Machine, run
from tests.models.memory_machine import MemoryMachine, Record
from tests.models.slot_machine import SlotMachine
from tests.models.waiting_machine import WaitingMachine

from penstock._pipeline.channels.memory import _Queue
from penstock._pipeline.channels.slots import SlotTable, Span
from penstock._pipeline.util.waiting import Waiters
from penstock._pipeline.workers.worker_accounting import WorkerAccounting
from penstock._stages.sampling.group_buffer import GroupBuffer
from penstock.channels import MemoryReceiver, MemorySender
from penstock.errors import IllegalTransition, ProtocolMismatch

__all__ = ["MUTANTS", "Mutant"]

# -- faults of the slot table ------------------------------------------------------------------------------------------


class AnyGenerationIsReleased(SlotTable):
    """The generation of a release is not compared."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.newest: dict[int, int] = {}

    def allocate(self, count: int, most: int = 0) -> Span | None:
        span = super().allocate(count, most)
        if span is not None:
            self.newest[span.start] = span.generation
        return span

    def release(self, start: int, generation: int, records: int = 1) -> Span:
        return super().release(start, self.newest.get(start, generation), records)


class GenerationsStandStill(SlotTable):
    """Every span is of the first generation."""

    def allocate(self, count: int, most: int = 0) -> Span | None:
        span = super().allocate(count, most)
        if span is not None:
            span.generation = 1
        return span


class FreeRunsStayApart(SlotTable):
    """Neighbours that are free do not become one run."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.runs = [set(range(slots))]

    def allocate(self, count: int, most: int = 0) -> Span | None:
        apart = count <= self.slots and all(len(free) < count for free in self.runs)
        span = None if apart else super().allocate(count, most)
        if span is not None:
            self.runs = [free - set(range(span.start, span.start + span.count)) for free in self.runs]
        return span

    def trim(self, span: Span, count: int) -> int:
        fewer = super().trim(span, count)
        self.runs.append(set(range(span.start + count, span.start + count + fewer)))
        return fewer

    def release(self, start: int, generation: int, records: int = 1) -> Span:
        span = super().release(start, generation, records)
        self.runs.append(set(range(span.start, span.start + span.count)))
        return span


class SpansOverlap(SlotTable):
    """A span is reported one slot longer than allocated."""

    def allocate(self, count: int, most: int = 0) -> Span | None:
        span = super().allocate(count, most)
        if span is not None and span.start + span.count < self.slots:
            span.count += 1
        return span


class WhatIsWrittenIsReleased(SlotTable):
    """A release does not ask whether the span was published."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.writing: dict[tuple[int, int], Span] = {}

    def allocate(self, count: int, most: int = 0) -> Span | None:
        span = super().allocate(count, most)
        if span is not None:
            self.writing[span.start, span.generation] = span
        return span

    def release(self, start: int, generation: int, records: int = 1) -> Span:
        span = self.writing.get((start, generation))
        if span is not None and span.state == "writing":
            self.publish(span, 0)
        return super().release(start, generation, records)


class PublishedIsPublishedAgain(SlotTable):
    """A published span may be published again."""

    def publish(self, span: Span, sequence: int, records: int = 1) -> None:
        with suppress(IllegalTransition):
            super().publish(span, sequence, records)


class AnyReleaseFrees(SlotTable):
    """A span is free with the first of its records that is released."""

    def publish(self, span: Span, sequence: int, records: int = 1) -> None:
        super().publish(span, sequence)


class TrimsKeepTheirSlots(SlotTable):
    """Slots that a span returns are reported free, and still belong to it."""

    def trim(self, span: Span, count: int) -> int:
        kept = span.count
        fewer = super().trim(span, count)
        span.count = kept
        return fewer


class SlotsLeak(SlotTable):
    """A released span is not free."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.spans: dict[tuple[int, int], Span] = {}

    def publish(self, span: Span, sequence: int, records: int = 1) -> None:
        super().publish(span, sequence, records)
        self.spans[span.start, span.generation] = span

    def release(self, start: int, generation: int, records: int = 1) -> Span:
        span = self.spans.get((start, generation))
        if span is None or span.records != records:
            return super().release(start, generation, records)
        return self.spans.pop((start, generation))


class TooLargeWaits(SlotTable):
    """A span that can never be allocated is waited for."""

    def allocate(self, count: int, most: int = 0) -> Span | None:
        return super().allocate(count, most) if count <= self.slots else None


# -- faults of its users -----------------------------------------------------------------------------------------------


class PublishesBeforeItWrites(Line):
    """The header says published while the bytes are still being copied."""

    def write(self) -> Step:
        result = super().write()
        assert self.writing is not None
        span = self.writing
        self.headers[span.start] = Header(True, self.sent + 1, span.count, span.generation)
        return result

    def _copy(self, span: Span) -> None:
        """Do nothing yet."""

    def publish(self) -> None:
        assert self.writing is not None
        super()._copy(self.writing)
        super().publish()


class RecoversEverything(Line):
    """Records that were received are recovered again."""

    def recover(self, sequence: int) -> list[Descriptor]:
        return super().recover(0)


class RecoversNothing(Line):
    """Published records of a dead process whose descriptors were not delivered are forgotten."""

    def recover(self, sequence: int) -> list[Descriptor]:
        return super().recover(sequence)[:0]


class ReleasesTooEarly(Line):
    """Credit goes back when a record is delivered, while it is still being read."""

    def take(self) -> Step:
        result = super().take()
        lease = next(lease for lease in self.leases if lease.sequence == result[1])
        if self.alive:
            self.back.append((lease.slot, lease.generation))
        return result

    def release(self, index: int) -> Step | None:
        underway, self.back = self.back, []
        result = super().release(index)
        self.back = underway
        return result

    def _check_credit(self) -> None:
        """Check nothing: this would find it a step earlier."""


class ForgetsARelease(Line):
    """A lease that ends returns no credit."""

    def release(self, index: int) -> Step | None:
        result = super().release(index)
        self.back = []
        return result


class ForgetsARecordAtTheFlush(Line):
    """A descriptor is dropped where the sender does not see it."""

    def flush(self) -> None:
        super().flush()
        self.wire = self.wire[:1]


class NeverLearns(Line):
    """The producer does not notice that its receiver died."""

    def steps(self) -> Iterator[Step]:
        return (step for step in super().steps() if step != ("learn",))


class NeverSettles(Line):
    """Records of a dead producer are never counted as lost."""

    def steps(self) -> Iterator[Step]:
        return (step for step in super().steps() if step != ("settle",))


class ReleasesGoByPlace(Channel):
    """A message to a dead producer reaches the one that replaced it."""

    def _after(self, state: State, worker: Worker, step: Step) -> State:
        after = super()._after(state, worker, step)
        place, restart = worker
        if step[0] == "release" and restart + 1 < len(after.lines[place]):
            lease = self._lines[state.lines[place][restart]].leases[step[1]]
            step = ("receive_of_another", lease.slot, lease.generation)
            after = super()._after(after, (place, restart + 1), step)
        return after


class TakesReleasesOfAnother(Line):
    """A line accepts releases of another."""

    def receive_of_another(self, slot: int, generation: int) -> None:
        if self.alive:
            self.back.append((slot, generation))

    def _check_credit(self) -> None:
        """Check nothing: this would find it before it is received."""


# -- faults of waiting -------------------------------------------------------------------------------------------------


class WakeUpsOfCancelledTasksAreLost(Waiters):
    """A wake-up that reaches a cancelled task is lost."""

    async def wait(self, *, first: bool = False) -> None:
        future = asyncio.get_running_loop().create_future()
        (self._queue.appendleft if first else self._queue.append)(future)
        try:
            await future
        finally:
            self._queue.remove(future)


class TheLastComesFirst(Waiters):
    """The newest waiter is woken first."""

    async def wait(self, *, first: bool = False) -> None:
        await super().wait(first=not first)


class NoTaskKeepsItsPlace(Waiters):
    """A task that was woken in vain goes to the end of the line."""

    async def wait(self, *, first: bool = False) -> None:
        await super().wait()


class WakesOneTooMany(Waiters):
    """One wake-up wakes two."""

    def wake_one(self) -> None:
        super().wake_one()
        super().wake_one()


# -- faults of the accounting ------------------------------------------------------------------------------------------


class DoesNotWaitForWhatWasPublished(WorkerAccounting):
    """A worker is settled as soon as it was reaped."""

    def ended(self, worker: str, reason: str, *, connected: bool = True, unaccounted_by: str = "") -> None:
        self._workers[worker].drained = True
        super().ended(worker, reason, connected=connected, unaccounted_by=unaccounted_by)


class DoesNotWaitForTheReaper(WorkerAccounting):
    """A worker is settled as soon as all was received."""

    def closed(self, peer: Any) -> None:
        self._workers[peer.name].reason = "unknown"
        super().closed(peer)

    def ended(self, worker: str, reason: str, *, connected: bool = True, unaccounted_by: str = "") -> None:
        if worker in self._workers:
            super().ended(worker, reason, connected=connected, unaccounted_by=unaccounted_by)


class BelievesAnyEnding(WorkerAccounting):
    """A worker may end a trajectory of another."""

    def _end(self, known: Any, ending: Any) -> None:
        holders = [each for each in self._workers.values() if ending.group in each.held]
        super()._end(holders[0] if holders else known, ending)


class TakesWhatAnotherHolds(WorkerAccounting):
    """A worker may send a trajectory of another."""

    def received(self, peer: Any, record: Any) -> Any:
        with suppress(ProtocolMismatch):
            return super().received(peer, record)


class ForgetsReports(WorkerAccounting):
    """The reports of workers are ignored."""

    def observed(self, peer: Any, payload: bytes) -> None:
        """Do nothing."""


class LosesWhatIsAssignedAgain(WorkerAccounting):
    """Trajectories that a dead worker held are lost, though they are assigned again."""

    def _settle_if_over(self, worker: str, known: Any) -> None:
        takes_back = self.on_returned
        self.on_returned = lambda group, mask: takes_back(group, mask) and False
        super()._settle_if_over(worker, known)
        self.on_returned = takes_back


class ForgetsWhatIsHeld(WorkerAccounting):
    """Trajectories that a dead worker held stay in flight for ever."""

    def _settle_if_over(self, worker: str, known: Any) -> None:
        if known.reason and known.drained:
            known.held.clear()
        super()._settle_if_over(worker, known)


class CountsTwice(WorkerAccounting):
    """A record that is received passes twice."""

    def received(self, peer: Any, record: Any) -> Any:
        self._counter.count(record)
        return super().received(peer, record)


class PassesCopiesOn(WorkerAccounting):
    """Copies that the ledger refuses pass."""

    def received(self, peer: Any, record: Any) -> Any:
        super().received(peer, record)
        return record


class DropsTheRestOfACopy(WorkerAccounting):
    """The rest of a record with copies is dropped."""

    def received(self, peer: Any, record: Any) -> Any:
        passed = super().received(peer, record)
        return passed if passed is record else None


# -- faults of the memory channel --------------------------------------------------------------------------------------


class BytesDoNotCount(_Queue[Record]):
    """The channel has no bound in bytes."""

    def has_room(self, nbytes: int) -> bool:
        return super().has_room(0)


class TheNewestIsReceived(MemoryReceiver[Record]):
    """The newest record is received first."""

    def receive_nowait(self) -> Record:
        self._queue.records.reverse()
        try:
            return super().receive_nowait()
        finally:
            self._queue.records.reverse()


class CancelledSendsArrive(MemorySender[Record]):
    """A send that is cancelled while it waits still sends its record."""

    async def _send_after_waiting(self, record: Record) -> None:
        try:
            await super()._send_after_waiting(record)
        except asyncio.CancelledError:
            self._queue.records.append((record, 0))
            self._queue.sent += 1
            raise


class ClosesQuietly(MemorySender[Record]):
    """Receivers do not notice that the last sender has closed."""

    def _on_close(self) -> None:
        self._queue.senders -= 1


def channel_of(
    queue: type[_Queue[Record]] = _Queue,
    outbox: type[MemorySender[Record]] = MemorySender,
    inbox: type[MemoryReceiver[Record]] = MemoryReceiver,
    waiters: type[Waiters] = Waiters,
) -> tuple[MemorySender[Record], MemoryReceiver[Record]]:
    made = queue(memory_machine.CAPACITY, memory_machine.CAPACITY_BYTES)
    made.waiting_senders, made.waiting_receivers = waiters(), waiters()
    return outbox(made), inbox(made)


# -- their detection ---------------------------------------------------------------------------------------------------


class Catcher(NamedTuple):
    """A search that may detect a fault."""

    name: str
    look: Callable[[], object]


def search(**faults: Any) -> Catcher:
    """Search a small channel: one producer, which may be killed and is restarted."""
    make: Callable[..., Channel] = faults.pop("channel", Channel)
    return Catcher("search", lambda: make((1, 1, 2), (1,), producers=1, copies=True, **faults).search())


def gather(assembly: type[GroupBuffer]) -> Catcher:
    """Search the assembly of two groups, of which one may wait and is remembered."""
    limits = {"prompts": 2, "most": 2, "ticks": 2, "max_groups": 1, "max_closed": 2}
    return Catcher("search", lambda: group_buffer_model.states(**limits, assembly=assembly))


def machine(kind: Machine, **faults: Any) -> Catcher:
    """Return a machine around a core with a fault."""
    faulty = type(f"Faulty{kind.__name__}", (kind,), faults)
    return Catcher(kind.__name__, partial(run, faulty, runs=200, steps=40, shrinks=False))


class Mutant(NamedTuple):
    """A core with a fault."""

    fault: type
    by: Catcher
    rule: str
    """The rule that it breaks."""
    or_rule: str = ""
    """Another that it may break first, as the steps come."""

    def __str__(self) -> str:
        return f"{self.fault.__name__} is caught by {self.by.name}: {self.rule}"


MUTANTS = [
    # The search, tests/models/test_channel_model.py:
    Mutant(AnyGenerationIsReleased, search(table=AnyGenerationIsReleased), channel_model.LATE),
    Mutant(GenerationsStandStill, search(table=GenerationsStandStill), channel_model.LATE),
    Mutant(FreeRunsStayApart, search(table=FreeRunsStayApart), channel_model.FREED),
    Mutant(SpansOverlap, search(table=SpansOverlap), channel_model.ONE_OWNER),
    Mutant(SlotsLeak, search(table=SlotsLeak), channel_model.ONE_OWNER),
    Mutant(PublishesBeforeItWrites, search(line=PublishesBeforeItWrites), channel_model.BYTES),
    Mutant(RecoversEverything, search(line=RecoversEverything), channel_model.ONCE),
    Mutant(RecoversNothing, search(line=RecoversNothing), channel_model.DELIVERED),
    Mutant(ReleasesTooEarly, search(line=ReleasesTooEarly), channel_model.BYTES),
    Mutant(ForgetsARelease, search(line=ForgetsARelease), channel_model.CREDIT),
    Mutant(ForgetsARecordAtTheFlush, search(line=ForgetsARecordAtTheFlush), channel_model.CREDIT),
    Mutant(NeverLearns, search(line=NeverLearns), channel_model.DELIVERED),
    Mutant(NeverSettles, search(line=NeverSettles), channel_model.ENDED),
    Mutant(ReleasesGoByPlace, search(channel=ReleasesGoByPlace, line=TakesReleasesOfAnother), channel_model.BELIEVED),
    Mutant(EndsCountTwice, search(ledger=EndsCountTwice), channel_model.BALANCE),
    Mutant(DeadWorkersAreForgotten, search(ledger=DeadWorkersAreForgotten), channel_model.TRUTH),
    # The search, tests/models/test_group_buffer_model.py:
    Mutant(MergesCopies, gather(MergesCopies), group_buffer_model.CONSERVED),
    Mutant(BeginsAnew, gather(BeginsAnew), group_buffer_model.ONCE),
    Mutant(WaitsForMore, gather(WaitsForMore), group_buffer_model.WHOLE),
    Mutant(ExpiresASecondLate, gather(ExpiresASecondLate), group_buffer_model.DUE),
    Mutant(NothingIsEvicted, gather(NothingIsEvicted), group_buffer_model.BOUNDED),
    Mutant(EvictionsAreNotReported, gather(EvictionsAreNotReported), group_buffer_model.CONSERVED),
    Mutant(ClosesBeforeItLeaves, gather(ClosesBeforeItLeaves), group_buffer_model.CLOSED),
    Mutant(KeepsTheRest, gather(KeepsTheRest), group_buffer_model.REST),
    # The machines, tests/models/test_machines.py:
    Mutant(AnyGenerationIsReleased, machine(SlotMachine, table=AnyGenerationIsReleased), slot_machine.STALE),
    Mutant(GenerationsStandStill, machine(SlotMachine, table=GenerationsStandStill), slot_machine.GENERATIONS),
    Mutant(FreeRunsStayApart, machine(SlotMachine, table=FreeRunsStayApart), slot_machine.FIRST_FIT),
    Mutant(SpansOverlap, machine(SlotMachine, table=SpansOverlap), slot_machine.FIRST_FIT),
    Mutant(WhatIsWrittenIsReleased, machine(SlotMachine, table=WhatIsWrittenIsReleased), slot_machine.REFUSED),
    Mutant(PublishedIsPublishedAgain, machine(SlotMachine, table=PublishedIsPublishedAgain), slot_machine.REFUSED),
    Mutant(SlotsLeak, machine(SlotMachine, table=SlotsLeak), slot_machine.OWNERS),
    Mutant(AnyReleaseFrees, machine(SlotMachine, table=AnyReleaseFrees), slot_machine.OWNERS),
    Mutant(TrimsKeepTheirSlots, machine(SlotMachine, table=TrimsKeepTheirSlots), slot_machine.OWNERS),
    Mutant(TooLargeWaits, machine(SlotMachine, table=TooLargeWaits), slot_machine.NEVER),
    Mutant(EndsCountTwice, machine(LedgerMachine, ledger=EndsCountTwice), ledger_machine.BALANCED),
    Mutant(AdmitsAgain, machine(LedgerMachine, ledger=AdmitsAgain), ledger_machine.NEW),
    Mutant(SendsCopies, machine(LedgerMachine, ledger=SendsCopies), ledger_machine.COPIES),
    Mutant(FailedSendsCount, machine(LedgerMachine, ledger=FailedSendsCount), ledger_machine.COPIES),
    Mutant(
        DeadWorkersAreForgotten,
        machine(LedgerMachine, ledger=DeadWorkersAreForgotten),
        ledger_machine.TRUE,
        or_rule=ledger_machine.OPEN,
    ),
    Mutant(ArrivalsAreNotAdmitted, machine(LedgerMachine, ledger=ArrivalsAreNotAdmitted), ledger_machine.BALANCED),
    Mutant(CopiesAreNotCounted, machine(LedgerMachine, ledger=CopiesAreNotCounted), ledger_machine.BALANCED),
    Mutant(UnsentIsForgotten, machine(LedgerMachine, ledger=UnsentIsForgotten), ledger_machine.TRUE),
    Mutant(UnsentIsNotAdmitted, machine(LedgerMachine, ledger=UnsentIsNotAdmitted), ledger_machine.BALANCED),
    Mutant(UnsentMayBeAnothers, machine(LedgerMachine, ledger=UnsentMayBeAnothers), ledger_machine.TRUE),
    Mutant(SuccessesAreForgotten, machine(LedgerMachine, ledger=SuccessesAreForgotten), ledger_machine.PROGRESS),
    Mutant(EndsWhatHasEnded, machine(LedgerMachine, ledger=EndsWhatHasEnded), ledger_machine.ONE_END),
    Mutant(CommitsHalf, machine(LedgerMachine, ledger=CommitsHalf), ledger_machine.OPEN),
    Mutant(
        CommitsTheLastPiece,
        machine(LedgerMachine, ledger=CommitsTheLastPiece),
        ledger_machine.TRUE,
        or_rule=ledger_machine.OPEN,
    ),
    Mutant(CommitsAgain, machine(LedgerMachine, ledger=CommitsAgain), ledger_machine.ONE_COMMIT),
    Mutant(ForgetsWhatWasTrained, machine(LedgerMachine, ledger=ForgetsWhatWasTrained), ledger_machine.OPEN),
    Mutant(LosesNothing, machine(LedgerMachine, ledger=LosesNothing), ledger_machine.TRUE),
    Mutant(MergesCopies, machine(AssemblyMachine, assembly=MergesCopies), group_buffer_machine.ONCE),
    Mutant(TakesCopiesForLate, machine(AssemblyMachine, assembly=TakesCopiesForLate), group_buffer_machine.COPIES),
    Mutant(BeginsAnew, machine(AssemblyMachine, assembly=BeginsAnew), group_buffer_machine.LATE),
    Mutant(
        RemembersForEver,
        machine(AssemblyMachine, assembly=RemembersForEver),
        group_buffer_machine.BOUNDED,
        or_rule=group_buffer_machine.LATE,
    ),
    Mutant(
        LatePiecesRenewTheirGroup,
        machine(AssemblyMachine, assembly=LatePiecesRenewTheirGroup),
        group_buffer_machine.LATE,
    ),
    Mutant(LeavesTooEarly, machine(AssemblyMachine, assembly=LeavesTooEarly), group_buffer_machine.WHOLE),
    Mutant(
        WaitsForMore,
        machine(AssemblyMachine, assembly=WaitsForMore),
        group_buffer_machine.BEYOND,
        or_rule=group_buffer_machine.WHOLE,
    ),
    Mutant(EveryPieceIsGivenTime, machine(AssemblyMachine, assembly=EveryPieceIsGivenTime), group_buffer_machine.DUE),
    Mutant(ExpiresOneAtATime, machine(AssemblyMachine, assembly=ExpiresOneAtATime), group_buffer_machine.DUE),
    Mutant(RoomIsNotGivenBack, machine(AssemblyMachine, assembly=RoomIsNotGivenBack), group_buffer_machine.BOUNDED),
    Mutant(NothingIsEvicted, machine(AssemblyMachine, assembly=NothingIsEvicted), group_buffer_machine.ROOM),
    Mutant(TheNewestIsEvicted, machine(AssemblyMachine, assembly=TheNewestIsEvicted), group_buffer_machine.ROOM),
    Mutant(
        EvictionsAreNotReported, machine(AssemblyMachine, assembly=EvictionsAreNotReported), group_buffer_machine.ONCE
    ),
    Mutant(LeavesTwice, machine(AssemblyMachine, assembly=LeavesTwice), group_buffer_machine.ONCE),
    Mutant(LatePiecesAreLost, machine(AssemblyMachine, assembly=LatePiecesAreLost), group_buffer_machine.ONCE),
    Mutant(TheRestOfAPieceIsLost, machine(AssemblyMachine, assembly=TheRestOfAPieceIsLost), group_buffer_machine.ONCE),
    Mutant(TheLastLeaveFirst, machine(AssemblyMachine, assembly=TheLastLeaveFirst), group_buffer_machine.IN_ORDER),
    Mutant(KeepsTheSlot, machine(AssemblyMachine, assembly=KeepsTheSlot), group_buffer_machine.COPIED),
    Mutant(KeepsTheRest, machine(AssemblyMachine, assembly=KeepsTheRest), group_buffer_machine.LEFT_OVER),
    Mutant(
        WakeUpsOfCancelledTasksAreLost,
        machine(WaitingMachine, waiters=WakeUpsOfCancelledTasksAreLost),
        waiting_machine.PASSED_ON,
    ),
    Mutant(
        TheLastComesFirst,
        machine(WaitingMachine, waiters=TheLastComesFirst),
        waiting_machine.IN_ORDER,
        or_rule=waiting_machine.PASSED_ON,
    ),
    Mutant(
        NoTaskKeepsItsPlace,
        machine(WaitingMachine, waiters=NoTaskKeepsItsPlace),
        waiting_machine.IN_ORDER,
        or_rule=waiting_machine.PASSED_ON,
    ),
    Mutant(
        WakesOneTooMany,
        machine(WaitingMachine, waiters=WakesOneTooMany),
        waiting_machine.WAITING,
        or_rule=waiting_machine.IN_ORDER,
    ),
    Mutant(
        WakeUpsOfCancelledTasksAreLost,
        machine(MemoryMachine, channel=lambda _: channel_of(waiters=WakeUpsOfCancelledTasksAreLost)),
        memory_machine.AWAKE,
    ),
    Mutant(
        BytesDoNotCount, machine(MemoryMachine, channel=lambda _: channel_of(BytesDoNotCount)), memory_machine.BOUNDED
    ),
    Mutant(
        TheNewestIsReceived,
        machine(MemoryMachine, channel=lambda _: channel_of(inbox=TheNewestIsReceived)),
        memory_machine.ONCE,
    ),
    Mutant(
        CancelledSendsArrive,
        machine(MemoryMachine, channel=lambda _: channel_of(outbox=CancelledSendsArrive)),
        memory_machine.UNDONE,
    ),
    Mutant(
        ClosesQuietly, machine(MemoryMachine, channel=lambda _: channel_of(outbox=ClosesQuietly)), memory_machine.ENDS
    ),
    Mutant(
        DoesNotWaitForWhatWasPublished,
        machine(RelayMachine, accounting_type=DoesNotWaitForWhatWasPublished),
        accounting_machine.SETTLED,
        or_rule=accounting_machine.REPORTED,
    ),
    Mutant(ForgetsWhatIsHeld, machine(RelayMachine, accounting_type=ForgetsWhatIsHeld), accounting_machine.SETTLED),
    Mutant(ForgetsReports, machine(SourceMachine, accounting_type=ForgetsReports), accounting_machine.REPORTED),
    Mutant(CountsTwice, machine(SourceMachine, accounting_type=CountsTwice), accounting_machine.COUNTED),
    Mutant(PassesCopiesOn, machine(SourceMachine, accounting_type=PassesCopiesOn), accounting_machine.COPIES),
    Mutant(DropsTheRestOfACopy, machine(SourceMachine, accounting_type=DropsTheRestOfACopy), accounting_machine.COPIES),
    Mutant(EndsCountTwice, machine(SourceMachine, ledger_type=EndsCountTwice), accounting_machine.BALANCED),
    Mutant(
        DoesNotWaitForTheReaper,
        machine(RelayMachine, accounting_type=DoesNotWaitForTheReaper),
        accounting_machine.SETTLED,
        or_rule=accounting_machine.REPORTED,
    ),
    Mutant(
        BelievesAnyEnding,
        machine(RelayMachine, accounting_type=BelievesAnyEnding),
        accounting_machine.OWN,
        or_rule=accounting_machine.SETTLED,
    ),
    Mutant(TakesWhatAnotherHolds, machine(RelayMachine, accounting_type=TakesWhatAnotherHolds), accounting_machine.OWN),
    Mutant(
        LosesWhatIsAssignedAgain,
        machine(AssignedMachine, accounting_type=LosesWhatIsAssignedAgain),
        accounting_machine.AGAIN,
    ),
]
