"""`Ledger` and `Account` against a table of trajectories: where each is, and how it ended.

Workers sample, fail, send and are killed; the trainer's process receives, ends, commits and tells. A worker hears of
ends late, and its page outlives it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.models.explore import Broken, hold
from tests.models.machine import PICKS, any_of, is_broken

from penstock import Ledger, TrainBatch, TrajectoryGroup, TrajectoryId
from penstock.errors import LedgerImbalance
from penstock.pipeline.ledger import ACCOUNT_BYTES, Account, Balance, EndState
from penstock.schemas import GroupId
from penstock.testing import group

__all__ = ["LEDGER_RULES", "LedgerMachine"]

BALANCED = "admitted = ended + in flight, at any moment and in every process"
TRUE = "the books say how many trajectories were admitted, are in flight, and ended how and why"
OPEN = "the books know which trajectories are in flight and which were trained"
PACED = "a worker's allowance is free again when it has heard of an end"
ONE_END = "a trajectory ends once"
ONE_COMMIT = "a trajectory is trained at most once"
NEW = "what is in flight already is not admitted again"

LEDGER_RULES = (BALANCED, TRUE, OPEN, PACED, ONE_END, ONE_COMMIT, NEW)

ENDS = st.sampled_from(["filtered", "stale", "rejected", "failed"])
PLACES = 2
"""Workers at a time."""


@dataclass(eq=False)
class Worker:
    """A worker's process, and its channel to the trainer's."""

    name: str
    ledger: Ledger
    account: Account
    """The trainer's view of its page."""
    alive: bool = True
    wire: deque[TrajectoryGroup] = field(default_factory=deque)
    """Groups on their way."""
    unheard: deque[tuple[GroupId, int, EndState, int]] = field(default_factory=deque)
    """Ends on their way back, as they are told."""
    allowance: set[TrajectoryId] = field(default_factory=set)
    """What it has in flight as far as it knows."""


@dataclass(eq=False)
class Fate:
    """Where a trajectory is."""

    worker: Worker | None
    place: str
    """worker, wire, trainer, or ended."""
    state: EndState | None = None
    reason: str = ""


class LedgerMachine(RuleBasedStateMachine):
    """A run, without its processes."""

    ledger: type[Ledger] = Ledger

    def __init__(self) -> None:
        super().__init__()
        self.trainer = type(self).ledger()
        self.workers: list[Worker] = []
        self.fates: dict[TrajectoryId, Fate] = {}
        self.prompts = 0
        self.started = 0
        for _ in range(PLACES):
            self._start()

    def _start(self) -> None:
        page, name = bytearray(ACCOUNT_BYTES), f"worker {self.started}"
        worker = Worker(name, type(self).ledger(Account(page)), Account(page, name))
        self.trainer.open_account(worker.account)
        self.workers.append(worker)
        self.started += 1

    def _at(self, place: str, worker: Worker | None = None) -> list[TrajectoryId]:
        return [one for one, fate in self.fates.items() if fate.place == place and worker in {None, fate.worker}]

    def _ended(self, one: TrajectoryId, state: EndState, reason: str) -> None:
        fate = self.fates[one]
        hold(ONE_END, fate.place != "ended", one)
        fate.place, fate.state, fate.reason = "ended", state, reason

    # -- in a worker -------------------------------------------------------------------------------------------------

    def _alive(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.alive]

    @rule(pick=PICKS, size=st.integers(1, 3))
    def admit(self, pick: int, size: int) -> None:
        worker = any_of(self._alive(), pick)
        name = GroupId("test", str(self.prompts))
        self.prompts += 1
        hold(NEW, worker.ledger.admit(name, range(size)) == size, name)
        self._entered(worker, [TrajectoryId(*name, repetition) for repetition in range(size)])

    def _entered(self, worker: Worker, ids: list[TrajectoryId]) -> None:
        worker.allowance.update(ids)
        self.fates |= {one: Fate(worker, "worker") for one in ids}

    @precondition(lambda self: any(worker.allowance for worker in self._alive()))
    @rule(pick=PICKS)
    def admit_again(self, pick: int) -> None:
        worker, one = any_of([(worker, one) for worker in self._alive() for one in sorted(worker.allowance)], pick)
        hold(NEW, worker.ledger.admit(one.group, [one.repetition_id]) == 0, one)

    @precondition(lambda self: self._at("worker"))
    @rule(pick=PICKS, state=ENDS, reason=st.sampled_from(["timeout", "too long"]))
    def end_in_the_worker(self, pick: int, state: EndState, reason: str) -> None:
        one = any_of(self._at("worker"), pick)
        worker = self.fates[one].worker
        assert worker is not None
        worker.ledger.end([one], state, reason)
        worker.allowance.remove(one)
        self._ended(one, state, f"in {worker.name}")

    @precondition(lambda self: self._at("worker"))
    @rule(pick=PICKS)
    def send(self, pick: int) -> None:
        """What a worker still has of a prompt leaves as one group."""
        one = any_of(self._at("worker"), pick)
        worker = self.fates[one].worker
        assert worker is not None
        together = [each for each in self._at("worker", worker) if each.group == one.group]
        repetitions = [each.repetition_id for each in together]
        worker.wire.append(
            group(completion_lengths=[1] * len(together), instance_id=one.instance_id, repetition_ids=repetitions)
        )
        for each in together:
            self.fates[each].place = "wire"

    @precondition(lambda self: any(worker.unheard for worker in self._alive()))
    @rule(pick=PICKS)
    def hear(self, pick: int) -> None:
        worker = any_of([worker for worker in self._alive() if worker.unheard], pick)
        name, mask, state, step = worker.unheard.popleft()
        worker.ledger.settle(name, mask, state, step)
        worker.allowance -= {TrajectoryId(*name, bit) for bit in range(mask.bit_length()) if mask >> bit & 1}

    @rule(pick=PICKS)
    def hear_of_a_predecessors(self, pick: int) -> None:
        any_of(self._alive(), pick).ledger.settle(GroupId("test", "of another process"), 0b11, "trained", 0)

    # -- in the trainer's process ------------------------------------------------------------------------------------

    @precondition(lambda self: any(worker.wire for worker in self.workers))
    @rule(pick=PICKS)
    def receive(self, pick: int) -> None:
        self._receive(any_of([worker for worker in self.workers if worker.wire], pick))

    def _receive(self, worker: Worker) -> None:
        record = worker.wire.popleft()
        self.trainer.take_over(record, lambda *ended: worker.unheard.append(ended), worker.account)
        for one in record.ids:
            self.fates[one].place = "trainer"

    @rule(size=st.integers(1, 3))
    def receive_from_a_stranger(self, size: int) -> None:
        record = group(completion_lengths=[1] * size, instance_id=str(self.prompts))
        self.prompts += 1
        self.trainer.take_over(record)
        self.fates |= {one: Fate(None, "trainer") for one in record.ids}

    @precondition(lambda self: self._at("trainer"))
    @rule(pick=PICKS, state=ENDS, reason=st.sampled_from(["old", ""]), whole=st.booleans())
    def end(self, pick: int, state: EndState, reason: str, *, whole: bool) -> None:
        """One trajectory, or all that are here of its prompt."""
        one = any_of(self._at("trainer"), pick)
        ids = [each for each in self._at("trainer") if each.group == one.group] if whole else [one]
        self.trainer.end(ids, state, reason)
        for each in ids:
            self._ended(each, state, reason)

    @precondition(lambda self: self._at("trainer"))
    @rule(pick=PICKS, prompts=st.integers(1, 3))
    def commit(self, pick: int, prompts: int) -> None:
        names = sorted({one.group for one in self._at("trainer")})
        chosen = {any_of(names, pick + offset) for offset in range(prompts)}
        ids = [one for one in self._at("trainer") if one.group in chosen]
        self.trainer.commit(_batch(ids), self.trainer.step + 1)
        for one in ids:
            self._ended(one, "trained", "")

    @precondition(lambda self: self._at("ended"))
    @rule(pick=PICKS)
    def end_again(self, pick: int) -> None:
        one = any_of(self._at("ended"), pick)
        self._refused(ONE_END, self.trainer.end, [*self._at("trainer"), one], "filtered")
        self._refused(ONE_COMMIT, self.trainer.commit, _batch([*self._at("trainer"), one]), self.trainer.step + 1)

    @precondition(lambda self: self._at("trainer"))
    @rule(pick=PICKS)
    def commit_twice_in_one_batch(self, pick: int) -> None:
        one = any_of(self._at("trainer"), pick)
        self._refused(ONE_COMMIT, self.trainer.commit, _batch([one], [one]), self.trainer.step + 1)

    @rule(pick=PICKS)
    def end_what_never_was(self, pick: int) -> None:
        never = TrajectoryId("test", "never", pick % 3)
        self._refused(ONE_END, self.trainer.end, [never], "stale")
        self._refused(ONE_END, any_of(self._alive(), pick).ledger.end, [never], "stale")

    @precondition(lambda self: any(fate.state == "trained" for fate in self.fates.values()))
    @rule(pick=PICKS)
    def admit_what_was_trained(self, pick: int) -> None:
        one = any_of([one for one, fate in self.fates.items() if fate.state == "trained"], pick)
        self._refused(ONE_COMMIT, self.trainer.admit, one.group, [one.repetition_id])

    def _refused(self, name: str, step: Callable[..., Any], *arguments: Any) -> None:
        """An imbalance is an error, and nothing is counted: that is seen by the invariants."""
        try:
            step(*arguments)
        except LedgerImbalance:
            return
        raise Broken(name, f"{step.__name__}{arguments} was taken")

    # -- deaths ------------------------------------------------------------------------------------------------------

    @rule(pick=PICKS, arrived=st.integers(0, 3), again=st.booleans())
    def kill(self, pick: int, arrived: int, *, again: bool) -> None:
        """A worker dies; what it had published is received, its account is closed, and another takes its place."""
        worker = any_of(self._alive(), pick)
        worker.alive = False
        while len(worker.wire) > arrived:  # never published
            for one in worker.wire.pop().ids:
                self.fates[one].place = "worker"
        if not again:
            self._settle(worker)
        self._start()

    @precondition(lambda self: any(not worker.alive for worker in self.workers))
    @rule(pick=PICKS)
    def settle_a_death(self, pick: int) -> None:
        """It takes a while until all has been received that a dead worker had published."""
        self._settle(any_of([worker for worker in self.workers if not worker.alive], pick))

    def _settle(self, worker: Worker) -> None:
        while worker.wire:
            self._receive(worker)
        self._balanced()
        held = self._at("worker", worker)
        lost = self.trainer.close_account(worker.account, f"{worker.name} was killed")
        hold(TRUE, lost == len(held), f"{lost} lost, {held} held")
        hold(ONE_END, self.trainer.close_account(worker.account, "again") == 0, worker.name)
        for one in held:
            self._ended(one, "lost", f"{worker.name} was killed")
        self.workers.remove(worker)

    def teardown(self) -> None:
        """The run ends: what is in flight is lost, and no page is open any more."""
        if is_broken():
            return
        in_flight = [one for one, fate in self.fates.items() if fate.place != "ended"]
        lost = self.trainer.lose("the run ended")
        hold(TRUE, lost == len(in_flight), f"{lost} lost, {in_flight} in flight")
        for one in in_flight:
            self._ended(one, "lost", "the run ended")
        self.the_trainers_books_are_true()

    # -- what must hold ----------------------------------------------------------------------------------------------

    def _balanced(self) -> Balance:
        balance = self.trainer.balance()
        hold(BALANCED, balance.balanced and balance.in_flight >= 0, balance)
        return balance

    @invariant()
    def the_trainers_books_are_true(self) -> None:
        balance = self._balanced()
        ended = Counter((fate.state, fate.reason) for fate in self.fates.values() if fate.state)
        told = {(state, why): count for state, all_of in balance.reasons.items() for why, count in all_of.items()}
        hold(TRUE, told == ended, f"{told}, but {ended}")
        hold(TRUE, {state: sum(all_of.values()) for state, all_of in balance.reasons.items()} == balance.ended, balance)
        hold(TRUE, balance.admitted == len(self.fates), f"{balance.admitted} of {len(self.fates)}")

    @invariant()
    def the_trainer_knows_what_is_where(self) -> None:
        for one, fate in self.fates.items():
            hold(OPEN, self.trainer.is_open(one) == (fate.place == "trainer"), one)
            hold(OPEN, self.trainer.is_committed(one) == (fate.state == "trained"), one)
        hold(OPEN, self.trainer.in_flight == len(self._at("trainer")), self.trainer)

    @invariant()
    def workers_know_their_allowance(self) -> None:
        for worker in self._alive():
            hold(BALANCED, worker.ledger.balance().balanced, worker.ledger)
            hold(PACED, worker.ledger.in_flight == len(worker.allowance), f"{worker.ledger!r}, {worker.allowance}")


def _batch(*parts: list[TrajectoryId]) -> TrainBatch:
    """A batch of these trajectories; of one twice where it is in two parts."""
    groups: list[TrajectoryGroup] = []
    for ids in parts:
        by_prompt: dict[str, list[int]] = {}
        for one in ids:
            by_prompt.setdefault(one.instance_id, []).append(one.repetition_id)
        groups += [
            group(completion_lengths=[1] * len(repetitions), instance_id=name, repetition_ids=repetitions)
            for name, repetitions in by_prompt.items()
        ]
    return TrainBatch.pack(groups)
