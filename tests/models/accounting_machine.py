"""`WorkerAccounting` against a list of events of workers that are killed and restarted.

The death of a worker is noticed in two ways, in either order: its process was reaped, and all was received that
it had published. What it held is settled when both are known, once, and never with what its successor holds.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.models.explore import hold
from tests.models.machine import PICKS, any_of, is_broken

from penstock import GroupId, TrajectoryGroup, TrajectoryId
from penstock._pipeline.accounting.end_states import EndState
from penstock._pipeline.accounting.repetition_sets import iter_bits
from penstock._pipeline.channels.peer import Peer
from penstock._pipeline.graph.context import Worker
from penstock._pipeline.graph.edge import EdgeCounter
from penstock._pipeline.workers.worker_accounting import WorkerAccounting
from penstock._pipeline.workers.worker_messages import Ending, WorkerEndState, WorkerReport
from penstock._schemas.control import PROTOCOL_VERSION, Connect
from penstock.accounting import Ledger, Metrics
from penstock.errors import PeerLost, ProtocolMismatch
from penstock.testing import group

__all__ = ["ACCOUNTING_RULES", "AssignedMachine", "RelayMachine", "SourceMachine", "peer"]

BALANCED = "admitted = ended + in flight, whatever workers do"
SETTLED = "records that a dead worker held leave it once it is reaped and all that it published is received"
REPORTED = "the reason of an end is known once the worker has reported it"
COUNTED = "a record that passes is counted once"
COPIES = "of a trajectory that two workers send, the first passes and the other is rejected"
AGAIN = "what a dead worker held is lost, unless it is assigned again"
OWN = "a worker ends its own trajectories, and names no more of others than it was given"

ACCOUNTING_RULES = (BALANCED, SETTLED, REPORTED, COUNTED, COPIES, AGAIN, OWN)

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
    is_assigned: ClassVar[bool] = False
    ledger_type: type[Ledger] = Ledger

    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.counter = self.ledger_type(), EdgeCounter()
        self.accounting = self.accounting_type(
            self.ledger, Metrics(), self.counter, source=self.is_source, assigned=self.is_assigned
        )
        self.processes: list[_Process] = []
        self.prompts = self.passed = 0
        for _ in range(2):
            self.start()

    def start(self) -> None:
        name = f"Sample, process {len(self.processes)}"
        process = _Process(name, peer(name))
        self._opened(process)
        self.accounting.open(name, Worker(0, 1))
        self.processes.append(process)

    def _opened(self, process: _Process) -> None:
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


class SourceMachine(_AccountingMachine):
    """Workers of a source that sample by themselves: their trajectories are admitted when they arrive, or are dropped.

    So the death of one loses nothing but what it had not sent, which was never admitted.
    """

    is_source = True

    def __init__(self) -> None:
        self.holds: dict[str, deque[TrajectoryGroup]] = {}
        self.sent: dict[str, set[str]] = {}
        """Prompts that were sent by each."""
        self.failed: Counter[str] = Counter()
        """Trajectories that were reported as failed, by the reason."""
        self.arrived: set[TrajectoryId] = set()
        self.copies = 0
        """Trajectories that were received again."""
        super().__init__()

    def _opened(self, process: _Process) -> None:
        self.holds[process.name], self.sent[process.name] = deque(), set()

    @rule(pick=PICKS, size=st.integers(1, 3))
    def sample(self, pick: int, size: int) -> None:
        self.holds[any_of(self._alive(), pick).name].append(self._new_group(size))

    @precondition(lambda self: any(self.holds[process.name] for process in self._alive()))
    @rule(pick=PICKS, reason=st.sampled_from(["timeout", "too long", ""]))
    def fail_or_send(self, pick: int, reason: str) -> None:
        """Fail a group, for a reason, or send it."""
        process = any_of([each for each in self._alive() if self.holds[each.name]], pick)
        record = self.holds[process.name].popleft()
        if reason:
            process.wire.append(_dropped(record, "failed", reason))
        else:
            self.sent[process.name].add(record.instance_id)
            process.wire.append(record)

    @precondition(lambda self: any(self.sent.values()))
    @rule(pick=PICKS, source=PICKS, size=st.integers(1, 3))
    def send_what_another_sent(self, pick: int, source: int, size: int) -> None:
        """Send as many trajectories of a prompt, or fewer, or more: a part of them may be copies."""
        process = any_of(self._alive(), pick)
        sent = set[str]().union(*self.sent.values()) - self.sent[process.name]
        if sent:
            record = group(completion_lengths=[1] * size, instance_id=any_of(sorted(sent), source))
            self.sent[process.name].add(record.instance_id)
            process.wire.append(record)

    @precondition(lambda self: self.arrived)
    @rule(pick=PICKS, size=st.integers(1, 3))
    def fail_what_has_arrived(self, pick: int, size: int) -> None:
        """Fail as many trajectories of a prompt that was received, or fewer, or more."""
        record = group(completion_lengths=[1] * size, instance_id=any_of(sorted(self.arrived), pick).instance_id)
        any_of(self._alive(), pick).wire.append(_dropped(record, "failed", "timeout"))

    def _take(self, process: _Process, record: TrajectoryGroup) -> None:  # noqa: ARG002 (whoever sent it)
        self.copies += len(self._copies_in(record))
        self.arrived.update(record.ids)

    def _copies_in(self, record: TrajectoryGroup) -> set[TrajectoryId]:
        return self.arrived.intersection(record.ids)

    def _received_report(self, process: _Process, report: bytes) -> None:  # noqa: ARG002 (whoever sent it)
        for ending in msgspec.msgpack.decode(report, type=WorkerReport).endings:
            self.failed[ending.reason] += len(_ids(ending) - self.arrived)

    def _settle(self, process: _Process) -> None:
        """Expect nothing: what it held was not admitted."""

    def _check(self, admitted: int, in_flight: int, reasons: dict[str, dict[str, int]]) -> None:
        hold(REPORTED, reasons["failed"] == dict(+self.failed), f"{reasons['failed']}, but {self.failed}")
        rejected = {"in flight already": self.copies} if self.copies else {}
        hold(COPIES, reasons["rejected"] == rejected, f"{reasons['rejected']}, but {rejected}")
        truth = len(self.arrived) + self.copies + self.failed.total(), len(self.arrived)
        hold(SETTLED, (admitted, in_flight) == truth, f"{admitted} admitted, {in_flight} in flight: {truth}")
        hold(SETTLED, not reasons["lost"], reasons["lost"])

    def teardown(self) -> None:
        self.accounting.close("unfinished", "the run ended")
        self.accounting.close("unfinished", "the run ended twice")
        balance = self.ledger.balance()
        hold(BALANCED, is_broken() or balance.in_flight == self.passed, balance)


class RelayMachine(_AccountingMachine):
    """Workers of a middle stage: the run's process tracks the records that it sends them."""

    is_source = False

    def __init__(self) -> None:
        self.held: dict[str, list[TrajectoryGroup]] = {}
        """Groups that each process holds."""
        self.with_it: dict[str, set[TrajectoryId]] = {}
        """Trajectories in each process, as far as the run's process knows."""
        self.given: Counter[str] = Counter()
        """Trajectories that each process ever held."""
        self.foreign: Counter[str] = Counter()
        """Trajectories that each process named without holding them."""
        self.ended: Counter[tuple[EndState, str]] = Counter()
        self.admitted = 0
        super().__init__()

    def _opened(self, process: _Process) -> None:
        self.held[process.name], self.with_it[process.name] = [], set()

    def _hold(self, process: _Process, record: TrajectoryGroup) -> None:
        self.given[process.name] += len(record)
        self.held[process.name].append(record)
        self.with_it[process.name].update(record.ids)

    @rule(pick=PICKS, size=st.integers(1, 3), fails=st.booleans())
    def hand(self, pick: int, size: int, *, fails: bool) -> None:
        process, record = any_of(self._alive(), pick), self._new_group(size)
        self.ledger.admit(record.id, range(size))
        self.admitted += size
        self.accounting.handed(process.name, record)
        if fails:
            self.accounting.returned(process.name, record)
            self.given[process.name] += size
        else:
            self._hold(process, record)

    @precondition(lambda self: any(self.held[process.name] for process in self._alive()))
    @rule(pick=PICKS, state=ENDS, dropped=st.booleans())
    def drop_or_send(self, pick: int, state: WorkerEndState, *, dropped: bool) -> None:
        process = any_of([each for each in self._alive() if self.held[each.name]], pick)
        record = self.held[process.name].pop(pick % len(self.held[process.name]))
        process.wire.append(_dropped(record, state, "for a reason") if dropped else record)

    @precondition(lambda self: any(self.with_it.values()))
    @rule(pick=PICKS)
    def name_what_another_holds(self, pick: int) -> None:
        """End or send a trajectory that the worker was not given."""
        owner = any_of([name for name, ids in self.with_it.items() if ids], pick)
        one = any_of(sorted(self.with_it[owner]), pick)
        others = [process for process in self._alive() if process.name != owner]
        if others:
            process = any_of(others, pick)
            record = group(completion_lengths=[1], instance_id=one.instance_id, rollout_ids=[one.repetition_id])
            self.foreign[process.name] += 1
            refused = self.foreign[process.name] > self.given[process.name]
            report = _dropped(record, "failed", "not its own")
            hold(OWN, _is_refused(self.accounting.observed, process.peer, report) == refused, one)
            hold(OWN, _is_refused(self.accounting.received, process.peer, record), one)

    def _take(self, process: _Process, record: TrajectoryGroup) -> None:
        self.with_it[process.name] -= set(record.ids)

    def _received_report(self, process: _Process, report: bytes) -> None:
        for ending in msgspec.msgpack.decode(report, type=WorkerReport).endings:
            self.with_it[process.name] -= _ids(ending)
            self.ended[ending.state, ending.reason] += len(ending.repetitions)

    def _settle(self, process: _Process) -> None:
        self.ended["lost", process.how] += len(self.with_it[process.name])
        self.with_it[process.name] = set()

    def _check(self, admitted: int, in_flight: int, reasons: dict[str, dict[str, int]]) -> None:
        truth = self.admitted, self.admitted - self.ended.total()
        hold(SETTLED, (admitted, in_flight) == truth, f"{admitted} admitted, {in_flight} in flight: {truth}")
        reported = {(state, why): count for state, all_of in reasons.items() for why, count in all_of.items()}
        hold(REPORTED, reported == +self.ended, f"{reported}, but {self.ended}")
        held = sum(len({one.group for one in ids}) for ids in self.with_it.values())
        hold(SETTLED, self.accounting.groups_held == held, f"{self.accounting.groups_held} groups held: {held}")

    def teardown(self) -> None:
        self.accounting.close("unfinished", "the run ended")
        self.accounting.close("unfinished", "the run ended twice")
        left = sum(len(ids) for ids in self.with_it.values())
        balance = self.ledger.balance()
        hold(BALANCED, is_broken() or balance.in_flight == self.admitted - self.ended.total() - left, balance)


class AssignedMachine(RelayMachine):
    """Workers of a source that are told what to sample: what one held when it died is assigned again once."""

    is_source = is_assigned = True

    def __init__(self) -> None:
        self.died_with: set[GroupId] = set()
        self.returned: list[tuple[GroupId, int]] = []
        """The repetitions that are to be assigned again."""
        super().__init__()
        self.accounting.on_returned = self._take_back

    def _take_back(self, prompt: GroupId, mask: int) -> bool:
        if prompt in self.died_with:
            return False
        self.died_with.add(prompt)
        self.returned.append((prompt, mask))
        return True

    @precondition(lambda self: self.returned)
    @rule(pick=PICKS)
    def assign_again(self, pick: int) -> None:
        process = any_of(self._alive(), pick)
        prompt, mask = self.returned.pop(0)
        repetitions = list(iter_bits(mask))
        self.accounting.assigned(process.name, prompt, mask)
        self._hold(
            process,
            group(completion_lengths=[1] * len(repetitions), instance_id=prompt.instance_id, rollout_ids=repetitions),
        )

    def _settle(self, process: _Process) -> None:
        returned = {(prompt, each) for prompt, mask in self.returned for each in iter_bits(mask)}
        for one in self.with_it[process.name]:
            if (one.group, one.repetition_id) not in returned:
                hold(AGAIN, one.group in self.died_with, one)
                self.ended["lost", process.how] += 1
        hold(
            AGAIN,
            all(self.ledger.trajectories.is_open(TrajectoryId(*prompt, each)) for prompt, each in returned),
            returned,
        )
        self.with_it[process.name] = set()


def _dropped(record: TrajectoryGroup, state: WorkerEndState, reason: str) -> bytes:
    """Return a worker's report that it dropped `record`."""
    ending = Ending(record.id, tuple(record.rollout_ids.tolist()), state, reason)
    return msgspec.msgpack.encode(WorkerReport(None, (ending,)))


def _ids(ending: Ending) -> set[TrajectoryId]:
    return {TrajectoryId(*ending.group, repetition) for repetition in ending.repetitions}


def _is_refused(act: Callable[..., object], *arguments: Any) -> bool:
    """Return whether the accounting refuses what a worker sends."""
    try:
        act(*arguments)
    except ProtocolMismatch:
        return True
    return False
