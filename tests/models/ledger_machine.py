"""`Ledger` against a list of deliveries, with the place and the end state of each.

A source, or the pipeline for a worker that it tells what to sample, admits trajectories and hands them over. Those of
other workers are admitted when they arrive, or when their worker reports that it has dropped them. The same trajectory
may be sampled by several, and sent twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.models.explore import Broken, hold
from tests.models.machine import PICKS, any_of, is_broken

from penstock import GroupId, TrainBatch, TrajectoryGroup, TrajectoryId
from penstock._pipeline.accounting.end_states import EndState
from penstock._pipeline.accounting.repetition_sets import iter_bits
from penstock.accounting import Balance, Ledger
from penstock.errors import LedgerImbalance
from penstock.testing import group

__all__ = ["LEDGER_RULES", "LedgerMachine"]

BALANCED = "admitted = ended + in flight, at any moment"
TRUE = "the ledger has the right numbers of admitted and ended trajectories and of those in flight, with reasons"
OPEN = "the ledger knows the trajectories in flight and the trained ones"
PROGRESS = "the counts of progress are those of the ends, and of the rollouts that succeeded"
ONE_END = "a trajectory ends once"
ONE_COMMIT = "a trajectory is trained at most once"
NEW = "a trajectory in flight is not admitted again"
COPIES = "of two deliveries of a trajectory the first passes, and the other is rejected on arrival"

LEDGER_RULES = (BALANCED, TRUE, OPEN, PROGRESS, ONE_END, ONE_COMMIT, NEW, COPIES)

ENDS = st.sampled_from(["filtered", "stale", "rejected", "failed", "lost"])

BEFORE = GroupId("test", "trained by the run before")


@dataclass(eq=False)
class Tracked:
    """One delivery of a trajectory, and its place."""

    one: TrajectoryId
    place: str
    """begun, sent, or ended: the first two are in flight."""
    state: EndState | None = None
    reason: str = ""


class LedgerMachine(RuleBasedStateMachine):
    """A run, without its processes."""

    ledger: type[Ledger] = Ledger

    def __init__(self) -> None:
        super().__init__()
        self.run = type(self).ledger()
        self.run.restore({BEFORE: 0b11}, 0)
        self.trained_before = set(_ids(BEFORE, 0b11))
        self.trajectories: list[Tracked] = []
        self.prompts = 0
        self.succeeded = 0

    def _at(self, *places: str) -> list[Tracked]:
        return [trajectory for trajectory in self.trajectories if trajectory.place in places]

    def _in_flight(self) -> list[Tracked]:
        return self._at("begun", "sent")

    def _new_prompt(self) -> GroupId:
        self.prompts += 1
        return GroupId("test", str(self.prompts))

    def _end(self, trajectory: Tracked, state: EndState, reason: str) -> None:
        hold(ONE_END, trajectory.place != "ended", trajectory.one)
        trajectory.place, trajectory.state, trajectory.reason = "ended", state, reason

    def _trained(self) -> set[TrajectoryId]:
        return {
            trajectory.one for trajectory in self.trajectories if trajectory.state == "trained"
        } | self.trained_before

    def _ever(self) -> list[TrajectoryId]:
        return sorted({trajectory.one for trajectory in self.trajectories} | self.trained_before)

    def _here(self) -> list[TrajectoryId]:
        return [trajectory.one for trajectory in self._in_flight()]

    def _of_prompt(self, trajectory: Tracked, *, whole: bool) -> list[Tracked]:
        """Return `trajectory` alone, or all of its prompt at the same place."""
        if not whole:
            return [trajectory]
        return [each for each in self._at(trajectory.place) if each.one.group == trajectory.one.group]

    def _why_a_copy(self, one: TrajectoryId) -> str:
        """Return the reason for which the ledger refuses it now; empty if it does not."""
        if one in self._trained():
            return "trained already"
        return "in flight already" if any(trajectory.one == one for trajectory in self._at("sent")) else ""

    # -- before it is sent -------------------------------------------------------------------------------------------

    @rule(size=st.integers(1, 3))
    def admit(self, size: int) -> None:
        name = self._new_prompt()
        hold(NEW, self.run.admit(name, range(size)) == size, name)
        self.trajectories += [Tracked(one, "begun") for one in _ids(name, (1 << size) - 1)]

    @precondition(lambda self: set(self._ever()) - self._trained())
    @rule(pick=PICKS)
    def admit_what_was_before(self, pick: int) -> None:
        """Admit a trajectory that is in flight, or that ended otherwise than trained."""
        one = any_of(sorted(set(self._ever()) - self._trained()), pick)
        new = [] if one in self._here() else [Tracked(one, "begun")]
        hold(NEW, self.run.admit(one.group, [one.repetition_id]) == len(new), one)
        self.trajectories += new

    @precondition(lambda self: self._at("begun"))
    @rule(pick=PICKS, fails_first=st.booleans(), whole=st.booleans())
    def send(self, pick: int, *, fails_first: bool, whole: bool) -> None:
        """Send begun trajectories of a prompt as one group, at the first or the second attempt."""
        together = self._of_prompt(any_of(self._at("begun"), pick), whole=whole)
        record = _record([each.one for each in together])
        self._hand_over(record)
        if fails_first:
            self.run.take_back(record)
            self._hand_over(record)
        for each in together:
            each.place = "sent"

    def _hand_over(self, record: TrajectoryGroup) -> None:
        self.succeeded += len(record)
        hold(COPIES, not self.run.hand_over(record), record)

    @rule(mask=st.integers(1, 0b111), pick=PICKS, new=st.booleans(), state=ENDS)
    def drop_unsent(self, mask: int, pick: int, state: EndState, *, new: bool) -> None:
        """End trajectories that a worker began by itself; it may name some that others sent, or that were trained."""
        name = self._new_prompt() if new else any_of(self._ever(), pick).group
        self.run.end_unsent(name, mask, state, "in a worker")
        known = {*self._here(), *self._trained()}
        for one in _ids(name, mask):
            if one not in known:
                dropped = Tracked(one, "begun")
                self.trajectories.append(dropped)
                self._end(dropped, state, "in a worker")

    # -- on arrival --------------------------------------------------------------------------------------------------

    @rule(mask=st.integers(1, 0b111), pick=PICKS, new=st.booleans())
    def arrive(self, mask: int, pick: int, *, new: bool) -> None:
        """Receive from a worker that samples by itself: a new group, or one of which a part may be copies."""
        name = self._new_prompt() if new else any_of(self._ever(), pick).group
        ids = _ids(name, mask)
        begun = {trajectory.one: trajectory for trajectory in self._at("begun")}
        why = {one.repetition_id: reason for one in ids if (reason := self._why_a_copy(one))}
        self.succeeded += len(ids)
        refused = self.run.hand_over(_record(ids))
        hold(COPIES, sorted(why) == list(iter_bits(refused)), f"{why}, {refused:b} refused")
        for one in ids:
            if one in begun:
                begun[one].place = "sent"
                continue
            arrived = Tracked(one, "sent")
            self.trajectories.append(arrived)
            if one.repetition_id in why:
                self._end(arrived, "rejected", why[one.repetition_id])

    @rule(copies=st.integers(1, 3))
    def refuse(self, copies: int) -> None:
        """Refuse copies that a stage has found."""
        self.run.refuse(copies, "duplicate")
        self.trajectories += [
            Tracked(TrajectoryId("test", "refused", 0), "ended", "rejected", "duplicate") for _ in range(copies)
        ]

    # -- ends --------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self._in_flight())
    @rule(pick=PICKS, state=ENDS, reason=st.sampled_from(["old", ""]), whole=st.booleans())
    def end(self, pick: int, state: EndState, reason: str, *, whole: bool) -> None:
        """End one trajectory, or several of its prompt."""
        together = self._of_prompt(any_of(self._in_flight(), pick), whole=whole)
        self.run.end([each.one for each in together], state, reason)
        for each in together:
            self._end(each, state, reason)

    @precondition(lambda self: self._in_flight())
    @rule(pick=PICKS, prompts=st.integers(1, 3), first=st.integers(0, 3))
    def commit(self, pick: int, prompts: int, first: int) -> None:
        """Train some prompts; the pieces of one may be at several positions of the batch."""
        names = sorted({one.group for one in self._here()})
        chosen = {any_of(names, pick + offset) for offset in range(prompts)}
        trajectories = [trajectory for trajectory in self._in_flight() if trajectory.one.group in chosen]
        ids = [trajectory.one for trajectory in trajectories]
        self.run.commit(_batch(ids[:first], ids[first:]), self.run.step + 1)
        for trajectory in trajectories:
            self._end(trajectory, "trained", "")

    @rule(pick=PICKS)
    def be_refused(self, pick: int) -> None:
        """End or train an absent trajectory, or one twice; admit a trained one; send a batch with a copy."""
        here, never = self._here(), TrajectoryId("test", "never", pick % 3)
        elsewhere = any_of(sorted({*self._ever(), never} - set(here)), pick)
        self._refused(ONE_END, self.run.end, [*here, elsewhere], "filtered")
        self._refused(ONE_COMMIT, self.run.commit, _batch([*here, elsewhere]), self.run.step + 1)
        trained = any_of(sorted(self._trained()), pick)
        self._refused(ONE_COMMIT, self.run.admit, trained.group, [trained.repetition_id])
        if here:
            one = any_of(here, pick)
            self._refused(ONE_COMMIT, self.run.commit, _batch([one], [one]), self.run.step + 1)
        copies = sorted({*(trajectory.one for trajectory in self._at("sent")), *self._trained()})
        self._refused(COPIES, self.run.hand_over, _batch([any_of(copies, pick)], [never]))
        self.succeeded += 2  # they had succeeded, whatever the batch is

    def _refused(self, name: str, step: Callable[..., Any], *arguments: Any) -> None:
        """Assert that an imbalance is an error, and that nothing is counted."""
        try:
            step(*arguments)
        except LedgerImbalance:
            self.the_ledger_knows_what_is_where()
            return
        raise Broken(name, f"{step.__name__}{arguments} was taken")

    def teardown(self) -> None:
        """End the run: trajectories in flight are unfinished."""
        if is_broken():
            return
        in_flight = self._in_flight()
        ended = self.run.end_all("unfinished", "the run ended")
        hold(TRUE, ended == len(in_flight), f"{ended} unfinished, {in_flight} in flight")
        for trajectory in in_flight:
            self._end(trajectory, "unfinished", "the run ended")
        self.the_ledger_is_true()

    # -- what must hold ----------------------------------------------------------------------------------------------

    def _balanced(self) -> Balance:
        balance = self.run.balance()
        hold(BALANCED, balance.balanced and balance.in_flight >= 0, balance)
        return balance

    @invariant()
    def the_ledger_is_true(self) -> None:
        balance = self._balanced()
        ended = Counter((trajectory.state, trajectory.reason) for trajectory in self.trajectories if trajectory.state)
        reports = {(state, why): count for state, all_of in balance.reasons.items() for why, count in all_of.items()}
        hold(TRUE, reports == ended, f"{reports}, but {ended}")
        hold(TRUE, {state: sum(all_of.values()) for state, all_of in balance.reasons.items()} == balance.ended, balance)
        hold(TRUE, balance.admitted == len(self.trajectories), f"{balance.admitted} of {len(self.trajectories)}")

    @invariant()
    def the_ledger_knows_what_is_where(self) -> None:
        here = Counter(self._here())
        trained, committed = self._trained(), self.run.committed
        for one in self._ever():
            hold(OPEN, self.run.trajectories.is_open(one) == here[one], one)
            hold(OPEN, committed.mask(one.group) >> one.repetition_id & 1 == (one in trained), one)
            known = self.run.trajectories.known(one.group) >> one.repetition_id & 1
            hold(OPEN, known == (one in here or one in trained), one)
        hold(OPEN, self.run.in_flight == here.total(), self.run)

    @invariant()
    def what_shows_progress_is_counted(self) -> None:
        progress, ended = self.run.progress(), Counter(trajectory.state for trajectory in self.trajectories)
        found = progress.failed, progress.rejected, progress.trained, progress.succeeded
        truth = ended["failed"], ended["rejected"], ended["trained"], self.succeeded
        hold(PROGRESS, found == truth, f"{progress}, but {truth}")


def _ids(name: GroupId, mask: int) -> list[TrajectoryId]:
    return [TrajectoryId(*name, repetition) for repetition in iter_bits(mask)]


def _record(ids: list[TrajectoryId]) -> TrajectoryGroup:
    """Return the group of these trajectories."""
    return _group(ids[0].instance_id, tuple(one.repetition_id for one in ids))


@cache
def _group(name: str, repetitions: tuple[int, ...]) -> TrajectoryGroup:
    return group(completion_lengths=[1] * len(repetitions), instance_id=name, rollout_ids=repetitions)


def _batch(*parts: list[TrajectoryId]) -> TrainBatch:
    """Return a batch of these trajectories; a prompt in two parts is in it twice."""
    groups: list[TrajectoryGroup] = []
    for ids in parts:
        by_prompt: dict[str, list[int]] = {}
        for one in ids:
            by_prompt.setdefault(one.instance_id, []).append(one.repetition_id)
        groups += [_group(name, tuple(repetitions)) for name, repetitions in by_prompt.items()]
    return TrainBatch.pack(groups)
