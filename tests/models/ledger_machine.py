"""`Ledger` and `SharedCounters` against a list of deliveries, with the place and the end state of each.

Workers sample, fail, send and are killed; the trainer's process receives, ends, commits and tells. A worker hears of
ends late, and its page outlives it. The same trajectory may be sampled by several, and sent twice.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.models.explore import Broken, hold
from tests.models.machine import PICKS, any_of, is_broken

from penstock import GroupId, TrainBatch, TrajectoryGroup, TrajectoryId
from penstock._pipeline.accounting.repetition_sets import iter_bits, mask_of
from penstock._pipeline.accounting.shared_counters import COUNTERS_BYTES, UNREPORTED, EndState, SharedCounters
from penstock.accounting import Balance, Ledger
from penstock.errors import LedgerImbalance
from penstock.testing import group

__all__ = ["LEDGER_RULES", "LedgerMachine"]

BALANCED = "admitted = ended + in flight, at any moment and in every process"
TRUE = "the ledger has the right numbers of admitted and ended trajectories and of those in flight, with reasons"
OPEN = "the ledger knows the trajectories in flight and the trained ones"
PACED = "a worker's allowance is free again when an end was reported to it"
ONE_END = "a trajectory ends once"
ONE_COMMIT = "a trajectory is trained at most once"
NEW = "a trajectory in flight is not admitted again"
COPIES = "of two deliveries of a trajectory the first passes, and the other is rejected on arrival"

LEDGER_RULES = (BALANCED, TRUE, OPEN, PACED, ONE_END, ONE_COMMIT, NEW, COPIES)

ENDS = st.sampled_from(["filtered", "stale", "rejected", "failed"])
PLACES = 2
"""Workers at the same time."""

BEFORE = GroupId("test", "trained by the run before")


@dataclass(eq=False)
class Worker:
    """A worker's process, and its channel to the trainer's."""

    name: str
    ledger: Ledger
    account: SharedCounters
    """The trainer's view of its page."""
    alive: bool = True
    wire: deque[list[Tracked]] = field(default_factory=deque)
    """Groups in transit."""
    unread: deque[tuple[GroupId, int, EndState, int]] = field(default_factory=deque)
    """Ends in transit to the worker."""
    allowance: set[TrajectoryId] = field(default_factory=set)
    """Trajectories in flight, as far as the worker knows."""


@dataclass(eq=False)
class Tracked:
    """One delivery of a trajectory, and its place."""

    one: TrajectoryId
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
        self.trainer.restore({BEFORE: 0b11}, 0)
        self.trained_before = set(_ids(BEFORE, 0b11))
        self.workers: list[Worker] = []
        self.trajectories: list[Tracked] = []
        self.prompts = 0
        self.started = 0
        for _ in range(PLACES):
            self._start()

    def _start(self) -> None:
        page, name = bytearray(COUNTERS_BYTES), f"worker {self.started}"
        worker = Worker(name, type(self).ledger(SharedCounters(page)), SharedCounters(page))
        self.trainer.attach_counters(worker.account)
        self.workers.append(worker)
        self.started += 1

    def _at(self, place: str, worker: Worker | None = None) -> list[Tracked]:
        return [
            trajectory
            for trajectory in self.trajectories
            if trajectory.place == place and worker in {None, trajectory.worker}
        ]

    def _new_prompt(self) -> GroupId:
        self.prompts += 1
        return GroupId("test", str(self.prompts))

    def _end(self, trajectory: Tracked, state: EndState, reason: str) -> None:
        hold(ONE_END, trajectory.place != "ended", trajectory.one)
        here = trajectory.place == "trainer" or (trajectory.place == "wire" and state == "rejected")
        if here and trajectory.worker is not None:
            reports = [end for end in trajectory.worker.unread if end[0] == trajectory.one.group and end[2] == state]
            hold(
                PACED,
                any(mask >> trajectory.one.repetition_id & 1 for _, mask, _, _ in reports),
                f"{trajectory.one} is not reported",
            )
        trajectory.place, trajectory.state, trajectory.reason = "ended", state, reason

    def _trained(self) -> set[TrajectoryId]:
        return {
            trajectory.one for trajectory in self.trajectories if trajectory.state == "trained"
        } | self.trained_before

    def _why_a_copy(self, one: TrajectoryId) -> str:
        """Return the reason for which the trainer's ledger refuses it now; empty if it does not."""
        if one in self._trained():
            return "trained already"
        return "in flight already" if any(trajectory.one == one for trajectory in self._at("trainer")) else ""

    # -- in a worker -------------------------------------------------------------------------------------------------

    def _alive(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.alive]

    @rule(pick=PICKS, size=st.integers(1, 3))
    def admit(self, pick: int, size: int) -> None:
        worker, name = any_of(self._alive(), pick), self._new_prompt()
        hold(NEW, worker.ledger.admit(name, range(size)) == size, name)
        self._entered(worker, _ids(name, (1 << size) - 1))

    def _entered(self, worker: Worker, ids: list[TrajectoryId]) -> None:
        worker.allowance.update(ids)
        self.trajectories += [Tracked(one, worker, "worker") for one in ids]

    @rule(pick=PICKS)
    def admit_what_was_before(self, pick: int) -> None:
        """Admit a trajectory that another worker, this one, or the run before has sampled."""
        worker, one = any_of(self._alive(), pick), any_of(self._ever(), pick)
        new = [] if one in worker.allowance else [one]
        hold(NEW, worker.ledger.admit(one.group, [one.repetition_id]) == len(new), one)
        self._entered(worker, new)

    def _sampling(self) -> list[Tracked]:
        """Return the trajectories in live workers."""
        return [
            trajectory for trajectory in self._at("worker") if trajectory.worker is not None and trajectory.worker.alive
        ]

    def _ever(self) -> list[TrajectoryId]:
        return sorted({trajectory.one for trajectory in self.trajectories} | self.trained_before)

    @precondition(lambda self: self._sampling())
    @rule(pick=PICKS, state=ENDS, reason=st.sampled_from(["timeout", "too long"]))
    def end_in_the_worker(self, pick: int, state: EndState, reason: str) -> None:
        trajectory = any_of(self._sampling(), pick)
        assert trajectory.worker is not None
        trajectory.worker.ledger.end([trajectory.one], state, reason)
        trajectory.worker.allowance.remove(trajectory.one)
        self._end(trajectory, state, UNREPORTED)

    @precondition(lambda self: self._sampling())
    @rule(pick=PICKS, fails_first=st.booleans())
    def send(self, pick: int, *, fails_first: bool) -> None:
        """Send a worker's remaining trajectories of a prompt as one group, at the first or the second attempt."""
        trajectory = any_of(self._sampling(), pick)
        worker = trajectory.worker
        assert worker is not None
        together = [each for each in self._at("worker", worker) if each.one.group == trajectory.one.group]
        record = _record(together)
        hold(COPIES, not worker.ledger.hand_over(record), record)
        if fails_first:
            worker.ledger.take_back(record)
            hold(COPIES, not worker.ledger.hand_over(record), record)
        worker.wire.append(together)
        for each in together:
            each.place = "wire"

    @precondition(lambda self: any(self._sent(worker) for worker in self._alive()))
    @rule(pick=PICKS)
    def send_again(self, pick: int) -> None:
        worker, one = any_of([(worker, one) for worker in self._alive() for one in self._sent(worker)], pick)
        again = Tracked(one, worker, "worker")
        refused = worker.ledger.hand_over(_record([again]))
        hold(COPIES, refused == mask_of([one.repetition_id]), one)
        self.trajectories.append(again)
        self._end(again, "rejected", UNREPORTED)

    def _sent(self, worker: Worker) -> list[TrajectoryId]:
        """Return the trajectories that it sent, without those of known end."""
        return sorted(worker.allowance - {trajectory.one for trajectory in self._at("worker", worker)})

    @precondition(lambda self: any(worker.unread for worker in self._alive()))
    @rule(pick=PICKS)
    def receive_report(self, pick: int) -> None:
        worker = any_of([worker for worker in self._alive() if worker.unread], pick)
        name, mask, state, step = worker.unread.popleft()
        worker.ledger.settle(name, mask, state, step)
        worker.allowance.difference_update(_ids(name, mask))

    # -- in the trainer's process ------------------------------------------------------------------------------------

    @precondition(lambda self: any(worker.wire for worker in self.workers))
    @rule(pick=PICKS)
    def receive(self, pick: int) -> None:
        self._receive(any_of([worker for worker in self.workers if worker.wire], pick))

    def _receive(self, worker: Worker) -> None:
        trajectories = worker.wire.popleft()
        refused = self.trainer.take_over(
            _record(trajectories), lambda *ended: self._report(worker, *ended), worker.account
        )
        self._arrived(trajectories, refused)

    def _report(self, worker: Worker, name: GroupId, mask: int, state: EndState, step: int) -> None:
        ended = {trajectory.one for trajectory in self._at("trainer", worker)}
        if state == "rejected":
            ended.update(trajectory.one for trajectory in self._at("wire", worker))  # a copy is refused as it arrives
        hold(PACED, ended.issuperset(_ids(name, mask)), f"{worker.name} hears of {name} {mask:b}, which is another's")
        worker.unread.append((name, mask, state, step))

    def _arrived(self, trajectories: list[Tracked], refused: int) -> None:
        why = {
            trajectory.one.repetition_id: reason
            for trajectory in trajectories
            if (reason := self._why_a_copy(trajectory.one))
        }
        hold(COPIES, sorted(why) == list(iter_bits(refused)), f"{why}, {refused:b} refused")
        for trajectory in trajectories:
            if trajectory.one.repetition_id in why:
                self._end(trajectory, "rejected", why[trajectory.one.repetition_id])
            else:
                trajectory.place = "trainer"

    @rule(pick=PICKS, new=st.booleans(), sampled_here=st.booleans())
    def receive_from_elsewhere(self, pick: int, *, new: bool, sampled_here: bool) -> None:
        """Receive from a source in the trainer's process, or one without counters: a new group, or an earlier one."""
        ids = _ids(self._new_prompt(), 0b111) if new else [any_of(self._ever(), pick)]
        trajectories = [Tracked(one, None, "wire") for one in ids]
        take = self.trainer.hand_over if sampled_here else self.trainer.take_over
        self._arrived(trajectories, take(_record(trajectories)))
        self.trajectories += trajectories

    @precondition(lambda self: self._at("trainer"))
    @rule(pick=PICKS, state=ENDS, reason=st.sampled_from(["old", ""]), whole=st.booleans())
    def end(self, pick: int, state: EndState, reason: str, *, whole: bool) -> None:
        """End one trajectory, or all of its prompt."""
        trajectory = any_of(self._at("trainer"), pick)
        together = (
            [each for each in self._at("trainer") if each.one.group == trajectory.one.group] if whole else [trajectory]
        )
        self.trainer.end([each.one for each in together], state, reason)
        for each in together:
            self._end(each, state, reason)

    @precondition(lambda self: self._at("trainer"))
    @rule(pick=PICKS, prompts=st.integers(1, 3), first=st.integers(0, 3))
    def commit(self, pick: int, prompts: int, first: int) -> None:
        """Train some prompts; the pieces of one may be at several positions of the batch."""
        names = sorted({trajectory.one.group for trajectory in self._at("trainer")})
        chosen = {any_of(names, pick + offset) for offset in range(prompts)}
        trajectories = [trajectory for trajectory in self._at("trainer") if trajectory.one.group in chosen]
        ids = [trajectory.one for trajectory in trajectories]
        self.trainer.commit(_batch(ids[:first], ids[first:]), self.trainer.step + 1)
        for trajectory in trajectories:
            self._end(trajectory, "trained", "")

    def _here(self) -> list[TrajectoryId]:
        return [trajectory.one for trajectory in self._at("trainer")]

    @rule(pick=PICKS)
    def be_refused(self, pick: int) -> None:
        """End or train an absent trajectory, or one twice; admit a trained one; send a batch with a copy."""
        here, never = self._here(), TrajectoryId("test", "never", pick % 3)
        elsewhere = any_of(sorted({*self._ever(), never} - set(here)), pick)
        self._refused(ONE_END, self.trainer.end, [*here, elsewhere], "filtered")
        self._refused(ONE_COMMIT, self.trainer.commit, _batch([*here, elsewhere]), self.trainer.step + 1)
        self._refused(ONE_END, any_of(self._alive(), pick).ledger.end, [never], "stale")
        any_of(self._alive(), pick).ledger.settle(
            never.group, 0b11, "trained", 0
        )  # it is notified of its predecessor's
        trained = any_of(sorted(self._trained()), pick)
        self._refused(ONE_COMMIT, self.trainer.admit, trained.group, [trained.repetition_id])
        if here:
            one = any_of(here, pick)
            self._refused(ONE_COMMIT, self.trainer.commit, _batch([one], [one]), self.trainer.step + 1)
            self._refused(COPIES, self.trainer.take_over, _batch([one], [never]))
            self._refused(COPIES, self.trainer.hand_over, _batch([one], [never]))

    def _refused(self, name: str, step: Callable[..., Any], *arguments: Any) -> None:
        """Assert that an imbalance is an error, and that nothing is counted."""
        try:
            step(*arguments)
        except LedgerImbalance:
            self.the_trainer_knows_what_is_where()
            return
        raise Broken(name, f"{step.__name__}{arguments} was taken")

    # -- deaths ------------------------------------------------------------------------------------------------------

    @rule(pick=PICKS, arrived=st.integers(0, 3), again=st.booleans())
    def kill(self, pick: int, arrived: int, *, again: bool) -> None:
        """Kill a worker; its published records are received, its counters closed, and another one replaces it."""
        worker = any_of(self._alive(), pick)
        worker.alive = False
        while len(worker.wire) > arrived:  # never published
            for trajectory in worker.wire.pop():
                trajectory.place = "worker"
        if not again:
            self._settle(worker)
        self._start()

    @precondition(lambda self: any(not worker.alive for worker in self.workers))
    @rule(pick=PICKS)
    def settle_a_death(self, pick: int) -> None:
        """Receive the published records of a dead worker, one after another."""
        self._settle(any_of([worker for worker in self.workers if not worker.alive], pick))

    def _settle(self, worker: Worker) -> None:
        while worker.wire:
            self._receive(worker)
        self._balanced()
        held = self._at("worker", worker)
        lost = self.trainer.detach_counters(worker.account, "lost", f"{worker.name} was killed")
        hold(TRUE, lost == len(held), f"{lost} lost, {held} held")
        hold(ONE_END, self.trainer.detach_counters(worker.account, "lost", "again") == 0, worker.name)
        for trajectory in held:
            self._end(trajectory, "lost", f"{worker.name} was killed")
        self.workers.remove(worker)

    def teardown(self) -> None:
        """End the run: trajectories in flight are unfinished, and all pages are closed."""
        if is_broken():
            return
        in_flight = [trajectory for trajectory in self.trajectories if trajectory.place != "ended"]
        ended = self.trainer.end_all("unfinished", "the run ended")
        hold(TRUE, ended == len(in_flight), f"{ended} unfinished, {in_flight} in flight")
        for trajectory in in_flight:
            self._end(trajectory, "unfinished", "the run ended")
        self.the_trainers_ledger_is_true()

    # -- what must hold ----------------------------------------------------------------------------------------------

    def _balanced(self) -> Balance:
        balance = self.trainer.balance()
        hold(BALANCED, balance.balanced and balance.in_flight >= 0, balance)
        return balance

    @invariant()
    def the_trainers_ledger_is_true(self) -> None:
        balance = self._balanced()
        ended = Counter((trajectory.state, trajectory.reason) for trajectory in self.trajectories if trajectory.state)
        reports = {(state, why): count for state, all_of in balance.reasons.items() for why, count in all_of.items()}
        hold(TRUE, reports == ended, f"{reports}, but {ended}")
        hold(TRUE, {state: sum(all_of.values()) for state, all_of in balance.reasons.items()} == balance.ended, balance)
        hold(TRUE, balance.admitted == len(self.trajectories), f"{balance.admitted} of {len(self.trajectories)}")

    @invariant()
    def the_trainer_knows_what_is_where(self) -> None:
        here = Counter(self._here())
        trained, committed = self._trained(), self.trainer.committed
        for one in self._ever():
            hold(OPEN, self.trainer.is_open(one) == here[one], one)
            hold(OPEN, committed.mask(one.group) >> one.repetition_id & 1 == (one in trained), one)
            known = self.trainer.known(one.group) >> one.repetition_id & 1
            hold(OPEN, known == (one in here or one in trained), one)
        hold(OPEN, self.trainer.in_flight == here.total(), self.trainer)

    @invariant()
    def workers_know_their_allowance(self) -> None:
        for worker in self._alive():
            hold(BALANCED, worker.ledger.balance().balanced, worker.ledger)
            hold(PACED, worker.ledger.in_flight == len(worker.allowance), f"{worker.ledger!r}, {worker.allowance}")


def _ids(name: GroupId, mask: int) -> list[TrajectoryId]:
    return [TrajectoryId(*name, repetition) for repetition in iter_bits(mask)]


def _record(trajectories: list[Tracked]) -> TrajectoryGroup:
    """Return the group of these trajectories."""
    return _group(trajectories[0].one.instance_id, tuple(trajectory.one.repetition_id for trajectory in trajectories))


@cache
def _group(name: str, repetitions: tuple[int, ...]) -> TrajectoryGroup:
    return group(completion_lengths=[1] * len(repetitions), instance_id=name, repetition_ids=repetitions)


def _batch(*parts: list[TrajectoryId]) -> TrainBatch:
    """Return a batch of these trajectories; a prompt in two parts is in it twice."""
    groups: list[TrajectoryGroup] = []
    for ids in parts:
        by_prompt: dict[str, list[int]] = {}
        for one in ids:
            by_prompt.setdefault(one.instance_id, []).append(one.repetition_id)
        groups += [_group(name, tuple(repetitions)) for name, repetitions in by_prompt.items()]
    return TrainBatch.pack(groups)
