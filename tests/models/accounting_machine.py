"""`WorkerAccounting` against a list of events of workers that are killed and restarted.

The death of a worker is noticed in two ways, in either order: its process was reaped, and all was received that
it had published. What it held is settled when both are known, once, and never with what its successor holds.
"""

from __future__ import annotations

import mmap
import os
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.models.explore import hold
from tests.models.machine import PICKS, any_of, is_broken

from penstock import TrajectoryGroup, TrajectoryId
from penstock._pipeline.accounting.shared_counters import UNREPORTED, EndState, SharedCounters
from penstock._pipeline.channels.peer import Peer
from penstock._pipeline.graph.edge import EdgeCounter
from penstock._pipeline.workers.worker_accounting import WorkerAccounting
from penstock._pipeline.workers.worker_messages import Ending, WorkerEndState, WorkerReport
from penstock._schemas.control import PROTOCOL_VERSION, Connect
from penstock.accounting import Ledger, Metrics
from penstock.errors import PeerLost
from penstock.testing import group

__all__ = ["ACCOUNTING_RULES", "RelayMachine", "SourceMachine", "peer"]

BALANCED = "admitted = ended + in flight, whatever workers do"
SETTLED = "records that a dead worker held are lost once it is reaped and all that it published is received"
REPORTED = "the reason of an end is known once the worker has reported it"
COUNTED = "a record that passes is counted once"
COPIES = "of a trajectory that two workers send, the first passes and the other is rejected"

ACCOUNTING_RULES = (BALANCED, SETTLED, REPORTED, COUNTED, COPIES)

ENDS = st.sampled_from(["filtered", "failed"])


@dataclass(eq=False)
class _Process:
    """A worker's process, and its messages in transit, in order."""

    name: str
    peer: Peer
    alive: bool = True
    reaped: bool = False
    drained: bool = False
    wire: deque[TrajectoryGroup | bytes] = field(default_factory=deque)

    @property
    def settled(self) -> bool:
        """Return whether it is reaped and drained."""
        return self.reaped and self.drained

    @property
    def how(self) -> str:
        return f"{self.name} was killed"


def peer(name: str) -> Peer:
    """Return the peer of a sender of that name."""
    return Peer(Connect(PROTOCOL_VERSION, "shm", "group", b"", name, 7), lambda _: None, 1)


class _AccountingMachine(RuleBasedStateMachine):
    """The rules that both machines use: processes start and die."""

    accounting_type: type[WorkerAccounting] = WorkerAccounting
    is_source: ClassVar[bool]
    ledger_type: type[Ledger] = Ledger

    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.counter = self.ledger_type(), EdgeCounter()
        self.accounting = self.accounting_type(self.ledger, Metrics(), self.counter, source=self.is_source)
        self.processes: list[_Process] = []
        self.prompts = self.passed = 0
        for _ in range(2):
            self.start()

    def start(self) -> None:
        name = f"Sample, process {len(self.processes)}"
        process = _Process(name, peer(name))
        self._opened(process, self.accounting.open(name))
        self.processes.append(process)

    def _opened(self, process: _Process, page: int) -> None:
        raise NotImplementedError

    def _take(self, process: _Process, record: TrajectoryGroup) -> None:
        raise NotImplementedError

    def _copies_in(self, record: TrajectoryGroup) -> set[TrajectoryId]:  # noqa: ARG002 (each is handed over once)
        return set()

    def _received_report(self, process: _Process, report: bytes) -> None:
        raise NotImplementedError

    def _settle(self, process: _Process) -> None:
        """Update the expectation: the process is reaped and drained."""
        raise NotImplementedError

    def _alive(self) -> list[_Process]:
        return [process for process in self.processes if process.alive]

    def _new_group(self, size: int) -> TrajectoryGroup:
        self.prompts += 1
        return group(completion_lengths=[1] * size, instance_id=str(self.prompts))

    @precondition(lambda self: any(process.wire for process in self.processes))
    @rule(pick=PICKS)
    def arrive(self, pick: int) -> None:
        self._arrive(any_of([process for process in self.processes if process.wire], pick))

    def _arrive(self, process: _Process) -> None:
        what = process.wire.popleft()
        if isinstance(what, bytes):
            self.accounting.observed(process.peer, what)
            self._received_report(process, what)
        else:
            passed = self.accounting.received(process.peer, what)
            copies = self._copies_in(what)
            expected = [one for one in what.ids if one not in copies]
            hold(COPIES, (passed.ids if passed else []) == expected, f"{what} came as {passed}: {copies} had come")
            hold(COPIES, copies or passed is what, f"{what} has no copies and came as another")
            self.passed += len(expected)
            self._take(process, what)

    @rule(pick=PICKS, replaced=st.booleans())
    def kill(self, pick: int, *, replaced: bool) -> None:
        any_of(self._alive(), pick).alive = False
        if replaced or not self._alive():
            self.start()

    @precondition(lambda self: any(not process.alive and not process.reaped for process in self.processes))
    @rule(pick=PICKS)
    def reap(self, pick: int) -> None:
        process = any_of([each for each in self.processes if not each.alive and not each.reaped], pick)
        process.reaped = True
        self.accounting.ended(process.name, process.how)
        self._settle_if_known(process)

    @precondition(lambda self: any(not process.alive and not process.drained for process in self.processes))
    @rule(pick=PICKS, closed=st.booleans())
    def drain(self, pick: int, *, closed: bool) -> None:
        process = any_of([each for each in self.processes if not each.alive and not each.drained], pick)
        while process.wire:
            self._arrive(process)
        process.drained = True
        if closed:
            self.accounting.closed(process.peer)
        else:
            self.accounting.lost(process.peer, PeerLost("its connection is closed"))
        self._settle_if_known(process)

    def _settle_if_known(self, process: _Process) -> None:
        if process.settled:
            self._settle(process)

    @invariant()
    def balanced(self) -> None:
        balance = self.ledger.balance()
        hold(BALANCED, balance.balanced and balance.in_flight >= 0, balance)
        hold(COUNTED, self.counter.trajectories == self.passed, f"{self.counter.trajectories} of {self.passed}")
        self._check(balance.admitted, balance.in_flight, balance.reasons)

    def _check(self, admitted: int, in_flight: int, reasons: dict[str, dict[str, int]]) -> None:
        raise NotImplementedError


@dataclass
class _Counts:
    """The actions of a source's process."""

    account: SharedCounters
    memory: mmap.mmap
    sampled: int = 0
    failed: int = 0
    passed: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Reasons of failed trajectories; `reported` holds those that were received."""
    reported: dict[str, int] = field(default_factory=dict)
    holds: deque[TrajectoryGroup] = field(default_factory=deque)
    sent: set[str] = field(default_factory=set)
    """Prompts that were sent; the counters exclude copies, which the worker's ledger refuses."""


class SourceMachine(_AccountingMachine):
    """Workers of a source, which count in shared pages."""

    is_source = True

    def __init__(self) -> None:
        self.counts: dict[str, _Counts] = {}
        self.lost: Counter[str] = Counter()
        self.arrived: set[TrajectoryId] = set()
        self.copies = 0
        """Trajectories that were received again."""
        super().__init__()

    def _opened(self, process: _Process, page: int) -> None:
        memory = mmap.mmap(page, mmap.PAGESIZE)
        os.close(page)
        self.counts[process.name] = _Counts(SharedCounters(memory), memory)

    @rule(pick=PICKS, size=st.integers(1, 3))
    def sample(self, pick: int, size: int) -> None:
        counts = self.counts[any_of(self._alive(), pick).name]
        counts.account.admit(size)
        counts.sampled += size
        counts.holds.append(self._new_group(size))

    @precondition(lambda self: any(self.counts[process.name].holds for process in self._alive()))
    @rule(pick=PICKS, reason=st.sampled_from(["timeout", "too long", ""]))
    def fail_or_send(self, pick: int, reason: str) -> None:
        """Fail a group, for a reason, or send it."""
        process = any_of([each for each in self._alive() if self.counts[each.name].holds], pick)
        counts = self.counts[process.name]
        record = counts.holds.popleft()
        if reason:
            counts.account.end("failed", len(record))
            counts.failed += len(record)
            counts.reasons[reason] += len(record)
        else:
            counts.sent.add(record.instance_id)
            process.wire.append(record)

    @precondition(lambda self: any(counts.sent for counts in self.counts.values()))
    @rule(pick=PICKS, source=PICKS, size=st.integers(1, 3))
    def send_what_another_sent(self, pick: int, source: int, size: int) -> None:
        """Send as many trajectories of a prompt, or fewer, or more: a part of them may be copies."""
        process = any_of(self._alive(), pick)
        counts = self.counts[process.name]
        sent = {prompt for each in self.counts.values() for prompt in each.sent} - counts.sent
        if sent:
            prompt = any_of(sorted(sent), source)
            counts.account.admit(size)
            counts.sampled += size
            counts.sent.add(prompt)
            process.wire.append(group(completion_lengths=[1] * size, instance_id=prompt))

    @rule(pick=PICKS)
    def report(self, pick: int) -> None:
        process = any_of(self._alive(), pick)
        reasons: dict[WorkerEndState, dict[str, int]] = {"failed": dict(self.counts[process.name].reasons)}
        process.wire.append(msgspec.msgpack.encode(WorkerReport(None, (), reasons)))

    def _take(self, process: _Process, record: TrajectoryGroup) -> None:
        self.counts[process.name].passed += len(record)
        self.copies += len(self._copies_in(record))
        self.arrived.update(record.ids)

    def _copies_in(self, record: TrajectoryGroup) -> set[TrajectoryId]:
        return self.arrived.intersection(record.ids)

    def _received_report(self, process: _Process, report: bytes) -> None:
        self.counts[process.name].reported = msgspec.msgpack.decode(report, type=WorkerReport).reasons["failed"]

    def _settle(self, process: _Process) -> None:
        counts = self.counts[process.name]
        self.lost[process.how] += counts.sampled - counts.failed - counts.passed

    def _check(self, admitted: int, in_flight: int, reasons: dict[str, dict[str, int]]) -> None:
        sampled = sum(counts.sampled for counts in self.counts.values())
        failed = sum(counts.failed for counts in self.counts.values())
        truth = sampled, sampled - failed - self.lost.total() - self.copies
        hold(SETTLED, (admitted, in_flight) == truth, f"{admitted} admitted, {in_flight} in flight: {truth}")
        rejected = {"in flight already": self.copies} if self.copies else {}
        hold(COPIES, reasons["rejected"] == rejected, f"{reasons['rejected']}, but {rejected}")
        hold(SETTLED, reasons["lost"] == dict(+self.lost), f"{reasons['lost']}, but {self.lost}")
        reported: Counter[str] = Counter()
        for counts in self.counts.values():
            reported.update(counts.reported)
            reported[UNREPORTED] += counts.failed - sum(counts.reported.values())
        hold(REPORTED, reasons["failed"] == dict(+reported), f"{reasons['failed']}, but {reported}")

    def teardown(self) -> None:
        self.accounting.close("unfinished", "the run ended")
        self.accounting.close("unfinished", "the run ended twice")
        balance = self.ledger.balance()
        hold(BALANCED, is_broken() or balance.in_flight == self.ledger.in_flight == self.passed, balance)
        for counts in self.counts.values():
            counts.account.close()
            counts.memory.close()


class RelayMachine(_AccountingMachine):
    """Workers of a middle stage, which count nothing: the run's process tracks their records."""

    is_source = False

    def __init__(self) -> None:
        self.held: dict[str, list[TrajectoryGroup]] = {}
        """Groups that each process holds."""
        self.with_it: dict[str, set[TrajectoryId]] = {}
        """Trajectories in each process, as far as the run's process knows."""
        self.ended: Counter[tuple[EndState, str]] = Counter()
        self.admitted = 0
        super().__init__()

    def _opened(self, process: _Process, page: int) -> None:
        os.close(page)
        self.held[process.name], self.with_it[process.name] = [], set()

    @rule(pick=PICKS, size=st.integers(1, 3), fails=st.booleans())
    def hand(self, pick: int, size: int, *, fails: bool) -> None:
        process, record = any_of(self._alive(), pick), self._new_group(size)
        self.ledger.admit(record.id, range(size))
        self.admitted += size
        self.accounting.handed(process.name, record)
        if fails:
            self.accounting.returned(process.name, record)
        else:
            self.held[process.name].append(record)
            self.with_it[process.name].update(record.ids)

    @precondition(lambda self: any(self.held[process.name] for process in self._alive()))
    @rule(pick=PICKS, state=ENDS, dropped=st.booleans())
    def drop_or_send(self, pick: int, state: WorkerEndState, *, dropped: bool) -> None:
        process = any_of([each for each in self._alive() if self.held[each.name]], pick)
        record = self.held[process.name].pop(pick % len(self.held[process.name]))
        if dropped:
            ending = Ending(record.id, tuple(record.repetition_ids.tolist()), state, "for a reason")
            process.wire.append(msgspec.msgpack.encode(WorkerReport(None, (ending,), {})))
        else:
            process.wire.append(record)

    @precondition(lambda self: any(self.with_it.values()))
    @rule(pick=PICKS)
    def end_what_another_holds(self, pick: int) -> None:
        """Report an end of a trajectory that the worker was not handed."""
        owner = any_of([name for name, ids in self.with_it.items() if ids], pick)
        one = any_of(sorted(self.with_it[owner]), pick)
        others = [process for process in self._alive() if process.name != owner]
        if others:
            ending = Ending(one.group, (one.repetition_id,), "failed", "not its own")
            self.accounting.observed(
                any_of(others, pick).peer, msgspec.msgpack.encode(WorkerReport(None, (ending,), {}))
            )

    def _take(self, process: _Process, record: TrajectoryGroup) -> None:
        self.with_it[process.name] -= set(record.ids)

    def _received_report(self, process: _Process, report: bytes) -> None:
        for ending in msgspec.msgpack.decode(report, type=WorkerReport).endings:
            ids = {TrajectoryId(*ending.group, repetition) for repetition in ending.repetitions}
            self.with_it[process.name] -= ids
            self.ended[ending.state, ending.reason] += len(ids)

    def _settle(self, process: _Process) -> None:
        self.ended["lost", process.how] += len(self.with_it[process.name])
        self.with_it[process.name] = set()

    def _check(self, admitted: int, in_flight: int, reasons: dict[str, dict[str, int]]) -> None:
        truth = self.admitted, self.admitted - self.ended.total()
        hold(SETTLED, (admitted, in_flight) == truth, f"{admitted} admitted, {in_flight} in flight: {truth}")
        reported = {(state, why): count for state, all_of in reasons.items() for why, count in all_of.items()}
        hold(REPORTED, reported == +self.ended, f"{reported}, but {self.ended}")

    def teardown(self) -> None:
        self.accounting.close("unfinished", "the run ended")
        self.accounting.close("unfinished", "the run ended twice")
        left = sum(len(ids) for ids in self.with_it.values())
        balance = self.ledger.balance()
        hold(BALANCED, is_broken() or balance.in_flight == self.admitted - self.ended.total() - left, balance)
