"""The guards of a run that makes no progress, by the counts of its ledger alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import structlog
from tests.cells import cells

from penstock import GroupId, TrajectoryId
from penstock._pipeline.accounting.end_states import OTHER_REASONS, EndState
from penstock._pipeline.accounting.epoch import Epoch
from penstock._pipeline.accounting.progress_guard import FAILURE_LIMIT, LOOK_EVERY, ProgressGuard
from penstock.accounting import Ledger
from penstock.errors import NothingTrained, RolloutsFailed
from penstock.testing import group

GROUP = 8


class Rollouts:
    """A ledger whose groups end at once, and a guard that checks it after every end."""

    def __init__(self, size: int = GROUP, **options: Any) -> None:
        self.ledger = Ledger()
        self.size = size
        self.guard = ProgressGuard(self.ledger, **options)
        self.ended = 0
        self._begun = 0

    def begin(self) -> list[TrajectoryId]:
        self._begun += 1
        self.ledger.admit(GroupId("test", str(self._begun)), range(self.size))
        return [TrajectoryId("test", str(self._begun), repetition) for repetition in range(self.size)]

    def end(self, groups: int, state: EndState = "filtered", reason: str = "zero variance") -> None:
        for _ in range(groups):
            self.ledger.end(self.begin(), state, reason)
            self.guard.check()
            self.ended += self.size

    def train(self, groups: int = 1) -> None:
        self.commit([self.begin() for _ in range(groups)])

    def commit(self, groups: list[list[TrajectoryId]]) -> None:
        self.ledger.commit_ids(chain.from_iterable(groups), self.ledger.step + 1)
        self.guard.check()

    def ends_by_itself(self) -> int:
        """Filter until the guard ends the run; return the number of trajectories that had ended."""
        before = self.ended
        with pytest.raises(NothingTrained):
            self.end(10**5)
        return self.ended + GROUP - before


# -- rollouts that fail --------------------------------------------------------------------------------------------


def test_a_success_ends_a_row_of_failures() -> None:
    run = Rollouts(size=1)

    for _ in range(10):
        run.end(FAILURE_LIMIT - 1, "failed", "timeout")
        run.ledger.succeed()

    with pytest.raises(RolloutsFailed, match="failures and no success between them"):
        run.end(2 * FAILURE_LIMIT, "failed", "timeout")


def test_failures_that_workers_report_count_as_those_of_the_pipeline() -> None:
    run = Rollouts()
    failing = GroupId("test", "in a worker")

    run.ledger.end_unsent(failing, (1 << FAILURE_LIMIT - 1) - 1, "failed", "timeout")
    run.guard.check()
    run.ledger.end_unsent(failing, 1, "failed", "timeout")
    with pytest.raises(RolloutsFailed):
        run.end(2, "failed", "timeout")


MANY = {OTHER_REASONS: 129, "no simulator for task 0": 1, "no simulator for task 1": 2}


@pytest.mark.parametrize(
    ("reasons", "message"),
    [
        ({"a": 60, "b": 3, "c": 2, "d": 1, "e": 1}, r"in all\): 60 × a, 3 × b, 2 × c, 2 more reasons\. Fix"),
        (MANY, r"2 × no simulator for task 1, 1 × no simulator for task 0, 129 × other reasons"),
    ],
    ids=["by frequency", "causes first"],
)
def test_the_message_lists_the_most_frequent_reasons_those_with_a_cause_first(
    reasons: dict[str, int], message: str
) -> None:
    ledger = Ledger(admits_on_end=True)
    for reason, count in reasons.items():
        ledger.end(group(completion_lengths=[1] * count, instance_id=reason), "failed", reason)

    with pytest.raises(RolloutsFailed, match=message):
        ProgressGuard(ledger).check()


# -- trajectories of which none is trained -------------------------------------------------------------------------


def test_a_run_that_trains_none_of_1024_trajectories_warns_once_with_the_counts_by_reason() -> None:
    run = Rollouts()

    with structlog.testing.capture_logs() as events:
        run.end(500)

    (warning,) = events
    assert (warning["event"], warning["log_level"], warning["in_a_row"]) == ("nothing_trained", "warning", 1024)
    assert warning["reasons"] == "1024 filtered (1024 × zero variance)"
    assert warning["ends_at"] == 10_240


def test_it_ends_at_ten_times_as_many_and_says_what_to_do() -> None:
    run = Rollouts()

    with structlog.testing.capture_logs(), pytest.raises(NothingTrained) as ended:
        run.end(10**4)

    assert run.ended + GROUP == 10_240
    assert "at least one of 10,240 trajectories in a row to be trained, got 10,240 that ended otherwise" in str(
        ended.value
    )
    assert "filtered (" in str(ended.value)
    assert "penstock samples" in str(ended.value)


@pytest.mark.parametrize("state", ["filtered", "stale", "rejected", "lost"])
def test_every_end_but_training_counts(state: EndState) -> None:
    run = Rollouts()

    with structlog.testing.capture_logs(), pytest.raises(NothingTrained, match=rf"{state} \(.* × because\)"):
        run.end(10**4, state, "because")


def test_ends_that_workers_report_at_once_count_each() -> None:
    run = Rollouts()

    with structlog.testing.capture_logs():
        run.ledger.end_unsent(GroupId("test", "in a worker"), (1 << 10_239) - 1, "filtered", "too long")
        run.guard.check()
        run.ledger.end_unsent(GroupId("test", "in a worker"), (1 << 16) - 1, "filtered", "too long")
        with pytest.raises(NothingTrained, match="filtered"):
            run.guard.check()


def test_the_bounds_are_ten_and_a_hundred_steps_where_these_are_more() -> None:
    stated, observed = Rollouts(per_step=512), Rollouts()
    observed.train(groups=64)

    with structlog.testing.capture_logs() as events:
        assert stated.ends_by_itself() == observed.ends_by_itself() == 51_200

    assert [event["in_a_row"] for event in events] == [5120, 5120]


STEP_GROUPS = [(size, groups) for size in (1, 8, 20) for groups in (1, 2, 6)] + [(size, 5) for size in (24, 64)]
"""Sizes of groups up to 20 with any step, and larger ones with steps of five groups."""


@pytest.mark.parametrize(("size", "groups"), cells(STEP_GROUPS, run=[(1, 1), (8, 2), (64, 5)]))
def test_one_trained_group_of_500_goes_on(size: int, groups: int) -> None:
    run = Rollouts(size, per_step=size * groups)

    with structlog.testing.capture_logs():
        for _ in range(2):
            batch = list[list[TrajectoryId]]()
            while len(batch) < groups:
                run.end(499)
                batch.append(run.begin())
            run.commit(batch)

    assert run.ledger.step == 2


def test_groups_in_flight_that_do_not_wait_postpone_the_end_by_one_look() -> None:
    run = Rollouts()

    def sample(groups: int) -> None:
        for _ in range(groups):
            sampled = run.begin()
            run.end(4)
            run.ledger.end(sampled, "filtered", "zero variance")
            run.ended += GROUP

    with structlog.testing.capture_logs(), pytest.raises(NothingTrained):
        sample(10**4)

    assert run.ended + GROUP <= 10_240 + 2 * LOOK_EVERY


def test_groups_that_wait_for_the_rest_of_their_batch_go_on_however_rare_they_are() -> None:
    run, batch = Rollouts(per_step=64), list[list[TrajectoryId]]()

    with structlog.testing.capture_logs():
        for _ in range(16):
            batch.append(run.begin())
            run.end(499)
        run.commit(batch)


def test_rollouts_that_take_longer_than_others_do_not_count_as_waiting_for_good() -> None:
    run = Rollouts()

    with structlog.testing.capture_logs():
        for _ in range(4):
            slow = run.begin()
            run.end(300)
            run.ledger.end(slow, "filtered", "zero variance")
        run.begin()
        assert run.ended + run.ends_by_itself() < 20_000


def test_a_row_begins_anew_after_a_trained_trajectory() -> None:
    run = Rollouts()

    with structlog.testing.capture_logs() as events:
        run.end(1279)
        run.train()
        assert run.ends_by_itself() == 10_240

    assert len(events) == 2


def test_what_a_sink_without_a_trainer_received_counts_as_a_success() -> None:
    received = 0
    run = Rollouts(delivered=lambda: received)

    for _ in range(3000):
        run.end(1, "filtered", "written")
        received += 1


def test_a_resumed_run_begins_a_new_row() -> None:
    run = Rollouts()
    run.ledger.restore({GroupId("test", "a"): 0b11}, step=300)

    with structlog.testing.capture_logs():
        assert run.ends_by_itself() == 10_240


def test_evaluated_trajectories_do_not_count() -> None:
    run = Rollouts()

    for _ in range(3000):
        run.ledger.evaluated += GROUP
        run.end(1, "filtered", "evaluation")


def test_copies_that_a_replay_sends_do_not_count_and_those_of_a_source_that_repeats_itself_do() -> None:
    run = Rollouts()
    sent = group(completion_lengths=[1] * 2000)
    run.ledger.hand_over(sent)
    for place in range(0, 2000, GROUP):
        run.commit([sent.ids[place : place + GROUP]])

    run.ledger.hand_over(sent)
    run.guard.check()
    assert run.ledger.progress().untrained == 0

    for _ in range(5):
        run.ledger.hand_over(sent)
        run.guard.check()
    run.ledger.hand_over(sent)
    with pytest.raises(NothingTrained, match="trained already"):
        run.guard.check()


# -- prompts that are rejected -------------------------------------------------------------------------------------


def rejecting(run: Rollouts) -> Callable[[], None]:
    return lambda: run.end(1, "rejected", "prompt longer than 3 tokens")


def test_an_epoch_in_which_no_prompt_fits_ends_the_run() -> None:
    run = Rollouts()
    run.ledger.epoch = Epoch(16 * GROUP, none_fits=True)

    for _ in range(15):
        rejecting(run)()
    with pytest.raises(NothingTrained, match=r"none in a whole epoch: 128 trajectories rejected \(128 × prompt longer"):
        rejecting(run)()


def test_a_large_epoch_is_searched_to_its_end() -> None:
    run = Rollouts()
    run.ledger.epoch = Epoch(2000 * GROUP)

    with structlog.testing.capture_logs():
        for _ in range(1999):
            rejecting(run)()


def test_no_prompt_fits_where_one_worker_has_looked_at_all_and_no_rollout_has_succeeded() -> None:
    run = Rollouts()
    run.ledger.epoch = Epoch.of_all([Epoch(), Epoch(GROUP, none_fits=True), Epoch(GROUP)])
    run.ledger.succeed()

    rejecting(run)()

    assert run.ledger.epoch == Epoch(GROUP, none_fits=True)
    assert Epoch.of_all([Epoch(), Epoch(GROUP)]) == Epoch(GROUP)
