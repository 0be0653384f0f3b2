from collections.abc import Mapping

import anyio
import numpy as np
import pytest

from penstock import GroupId, TrainBatch, TrajectoryGroup
from penstock.accounting import Ledger
from penstock.errors import InvalidRecord, LedgerImbalance
from penstock.testing import group

A, B = GroupId("test", "a"), GroupId("test", "b")


def ledger_with(*groups: GroupId, size: int = 2) -> Ledger:
    ledger = Ledger()
    for name in groups:
        ledger.admit(name, range(size))
    return ledger


def test_every_admitted_trajectory_ends_in_one_state_with_a_reason() -> None:
    ledger = ledger_with(A, B)

    ledger.end(group(instance_id="a"), "filtered", "zero_variance")
    ledger.end(group(instance_id="b").ids[:1], "failed", "timeout")

    balance = ledger.balance()
    assert balance.admitted == 4
    assert balance.in_flight == 1
    assert balance.ended == {
        "trained": 0,
        "filtered": 2,
        "stale": 0,
        "rejected": 0,
        "failed": 1,
        "lost": 0,
        "unfinished": 0,
    }
    assert balance.reasons["filtered"] == {"zero_variance": 2}
    assert balance.reasons["failed"] == {"timeout": 1}
    assert balance.balanced


def test_a_step_of_a_trainer_without_batches_commits_trajectories_by_their_ids() -> None:
    ledger = ledger_with(A, B)
    steps: list[int] = []

    with ledger.on_step(steps.append):
        ledger.commit_ids([*group(instance_id="a").ids, *group(instance_id="b").ids[:1]], step=3)
        ledger.commit_ids([], step=4)

    assert (ledger.step, steps) == (4, [3, 4])
    assert dict(ledger.committed) == {A: 0b11, B: 0b1}
    assert ledger.balance().ended["trained"] == 3
    with pytest.raises(LedgerImbalance, match="was trained before and is committed again"):
        ledger.commit_ids(group(instance_id="b").ids, step=5)
    assert (ledger.step, ledger.balance().in_flight) == (4, 1)


def test_admitting_what_is_in_flight_counts_nothing() -> None:
    ledger = ledger_with(A)
    assert ledger.admit(A, [0, 1, 2]) == 1
    assert ledger.balance().admitted == 3


def test_ending_twice_or_without_admission_is_an_imbalance() -> None:
    ledger = ledger_with(A)
    ledger.end(group(instance_id="a"), "stale", "old")

    with pytest.raises(LedgerImbalance, match=r"test/a repetitions \[0, 1\] ended as lost but is not in flight"):
        ledger.end(group(instance_id="a"), "lost", "again")
    with pytest.raises(LedgerImbalance, match="test/never"):
        ledger.end(group(instance_id="never"), "lost", "x")
    assert ledger.balance().balanced


def test_a_group_without_sequences_that_was_put_together_by_hand_is_refused_before_it_counts() -> None:
    columns = {name: column[:0] for name, column in group().columns().items()} | {"offsets": np.zeros(1, np.int64)}
    ledger = Ledger()

    with pytest.raises(InvalidRecord, match="expected at least one sequence, got 0"):
        ledger.hand_over(TrajectoryGroup.assemble(group().header(), columns))
    assert ledger.balance().admitted == 0


def test_a_trajectory_is_trained_at_most_once() -> None:
    ledger = ledger_with(A)
    batch = TrainBatch.pack([group(instance_id="a")])
    ledger.commit(batch, step=1)

    with pytest.raises(LedgerImbalance, match="was trained before and is committed again"):
        ledger.commit(batch, step=2)
    with pytest.raises(LedgerImbalance, match="was trained before and is admitted again"):
        ledger.admit(A, [1])

    assert ledger.committed == {A: 0b11}
    assert ledger.balance().ended["trained"] == 2


@pytest.mark.parametrize("refused", [["a", "never"], ["b", "b"], ["a", "b", "c"]])
def test_a_commit_that_is_refused_counts_nothing(refused: list[str]) -> None:
    ledger = ledger_with(A, B, GroupId("test", "c"))
    ledger.commit(TrainBatch.pack([group(instance_id="c")]), step=1)
    before = ledger.balance(), ledger.committed, ledger.step

    with pytest.raises(LedgerImbalance):
        ledger.commit(TrainBatch.pack([group(instance_id=name) for name in refused]), step=2)

    assert (ledger.balance(), ledger.committed, ledger.step) == before


def test_an_end_that_is_refused_counts_nothing() -> None:
    ledger = ledger_with(A)
    before = ledger.balance()

    with pytest.raises(LedgerImbalance):
        ledger.end([*group(instance_id="a").ids, *group(instance_id="never").ids], "stale", "old")

    assert ledger.balance() == before


def test_what_a_checkpoint_keeps_is_not_trained_again_by_the_run_that_resumes_it() -> None:
    before, after = ledger_with(A), Ledger()
    before.commit(TrainBatch.pack([group(instance_id="a")]), step=5)

    after.restore(before.committed, before.step)

    assert after.step == 5
    with pytest.raises(LedgerImbalance):
        after.admit(A, [0])


# -- repeated deliveries ---------------------------------------------------------------------------------------------


def test_of_two_deliveries_the_first_goes_on_and_the_copy_is_rejected_in_flight_already() -> None:
    ledger = Ledger()
    assert ledger.hand_over(group(instance_id="a", rollout_ids=[0, 1])) == 0

    assert ledger.hand_over(group(instance_id="a", rollout_ids=[1, 2])) == 0b010

    balance = ledger.balance()
    assert (balance.admitted, balance.in_flight) == (4, 3)
    assert balance.reasons["rejected"] == {"in flight already": 1}


def test_what_the_run_before_trained_is_rejected_trained_already() -> None:
    ledger = Ledger()
    ledger.restore({A: 0b01}, step=5)

    assert ledger.hand_over(group(instance_id="a")) == ledger.hand_over(group(instance_id="a", rollout_ids=[0, 2]))

    assert ledger.balance().reasons["rejected"] == {"trained already": 2}
    assert ledger.in_flight == 2


def test_what_ended_otherwise_may_come_again_and_is_judged_anew() -> None:
    ledger = ledger_with(A)
    ledger.end(group(instance_id="a"), "stale", "old")

    assert ledger.hand_over(group(instance_id="a")) == 0

    assert ledger.balance().admitted == 4
    assert ledger.in_flight == 2


def test_what_was_begun_is_handed_over_once_unless_the_send_failed() -> None:
    ledger, record = ledger_with(A), group(instance_id="a")

    assert ledger.hand_over(record) == 0
    ledger.take_back(record)
    assert ledger.hand_over(record) == 0
    assert ledger.hand_over(record) == 0b11

    balance = ledger.balance()
    assert (balance.admitted, balance.in_flight) == (4, 2)
    assert balance.reasons["rejected"] == {"in flight already": 2}


def test_a_send_that_failed_when_its_trajectories_had_ended_leaves_nothing_behind() -> None:
    ledger, record = Ledger(), group(instance_id="a")
    ledger.hand_over(record)
    ledger.end(record, "failed", "late")

    ledger.take_back(record)

    assert ledger.in_flight == 0
    assert not ledger.trajectories._begun


def test_a_batch_with_a_copy_is_an_imbalance_for_it_cannot_go_on_without_it() -> None:
    ledger = Ledger()
    ledger.hand_over(group(instance_id="a"))
    before = ledger.balance()

    with pytest.raises(
        LedgerImbalance, match=r"test/a repetitions \[0, 1\] is in flight or was trained, and arrives again"
    ):
        ledger.hand_over(TrainBatch.pack([group(instance_id="b"), group(instance_id="a")]))

    assert ledger.balance() == before


def test_the_copies_that_a_stage_finds_count_as_admitted_and_rejected() -> None:
    ledger = ledger_with(A)

    ledger.refuse(2, "duplicate")

    assert ledger.balance().reasons["rejected"] == {"duplicate": 2}
    assert ledger.balance().balanced
    assert ledger.in_flight == 2


# -- trajectories that a worker of a source began ----------------------------------------------------------------------


def test_a_trajectory_that_a_worker_dropped_before_it_was_sent_counts_as_admitted_and_ended() -> None:
    ledger, ends = Ledger(), list[int]()

    with ledger.on_end(lambda: ends.append(ledger.ended_here)):
        ledger.end_unsent(A, 0b111, "failed", "timeout")

    balance = ledger.balance()
    assert (balance.admitted, balance.in_flight) == (3, 0)
    assert balance.reasons["failed"] == {"timeout": 3}
    assert ends == [3]


def test_a_drop_of_what_is_in_flight_or_was_trained_ends_nothing_of_it() -> None:
    ledger = ledger_with(A)
    ledger.restore({B: 0b01}, step=5)

    ledger.end_unsent(A, 0b111, "failed", "timeout")
    ledger.end_unsent(B, 0b11, "failed", "timeout")

    balance = ledger.balance()
    assert (balance.admitted, balance.in_flight) == (4, 2)
    assert balance.reasons["failed"] == {"timeout": 2}
    assert ledger.committed == {B: 0b01}


# -- callbacks -------------------------------------------------------------------------------------------------------


def test_a_ledger_announces_checkpoints_to_registered_callbacks() -> None:
    ledger, checkpoints = Ledger(), list[Mapping[GroupId, int]]()

    with ledger.on_checkpoint(checkpoints.append):
        ledger.announce_checkpoint({A: 1})
    ledger.announce_checkpoint({B: 1})

    assert checkpoints == [{A: 1}]


async def test_a_group_has_ended_with_the_last_of_its_trajectories() -> None:
    ledger = ledger_with(A, B)
    order: list[str] = []

    async def waiting() -> None:
        await ledger.ended(A)
        order.append("ended")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(waiting)
        await anyio.wait_all_tasks_blocked()
        for trajectory in group(instance_id="a").ids:
            order.append("end one")
            ledger.end([trajectory], "failed", "x")
            await anyio.wait_all_tasks_blocked()
    await ledger.ended(A)
    assert order == ["end one", "end one", "ended"]


async def test_room_comes_when_trajectories_end() -> None:
    ledger = ledger_with(A, B)
    order: list[str] = []

    async def sampler() -> None:
        await ledger.room(3)
        order.append("room")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sampler)
        await anyio.wait_all_tasks_blocked()
        order.append("end one")
        ledger.end(group(instance_id="a").ids[:1], "failed", "x")
        await anyio.wait_all_tasks_blocked()
        order.append("end another")
        ledger.end(group(instance_id="a").ids[1:], "failed", "x")
    assert order == ["end one", "end another", "room"]


def test_the_pace_is_what_is_expected_and_then_the_mean_of_trained_groups_per_step() -> None:
    ledger = Ledger()
    assert ledger.pace.per_step is None
    ledger.pace.expected = 100
    assert ledger.pace.per_step == 100
    for step, names in enumerate(("a", "bc", "defg"), start=1):
        batch = TrainBatch.pack([group(instance_id=name) for name in names])
        for name in names:
            ledger.admit(GroupId("test", name), range(2))
        ledger.commit(batch, step)
    assert ledger.pace.per_step == pytest.approx((2 + 4 + 8) / 3)


def test_without_a_pipeline_ended_trajectories_count_as_admitted() -> None:
    ledger = Ledger(admits_on_end=True)
    ledger.end(group(), "filtered", "x")
    ledger.commit(TrainBatch.pack([group(instance_id="a")]), step=1)
    ledger.end(group(instance_id="a"), "rejected", "it came again")
    assert ledger.balance().admitted == 6
    assert ledger.balance().balanced
