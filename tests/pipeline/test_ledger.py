from collections.abc import Mapping

import anyio
import numpy as np
import pytest

from penstock import GroupId, TrainBatch, TrajectoryGroup
from penstock._pipeline.processes.shared_counters import COUNTERS_BYTES, EndState, SharedCounters
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
    assert balance.ended == {"trained": 0, "filtered": 2, "stale": 0, "rejected": 0, "failed": 1, "lost": 0}
    assert balance.reasons["filtered"] == {"zero_variance": 2}
    assert balance.reasons["failed"] == {"timeout": 1}
    assert balance.balanced


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

    assert ledger.is_committed(group(instance_id="a").ids[1])
    assert not ledger.is_committed(group(instance_id="b").ids[1])
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


# -- what is delivered twice -----------------------------------------------------------------------------------------


def test_of_two_deliveries_the_first_goes_on_and_the_copy_is_rejected_in_flight_already() -> None:
    ledger = Ledger()
    assert ledger.take_over(group(instance_id="a", repetition_ids=[0, 1])) == 0

    assert ledger.take_over(group(instance_id="a", repetition_ids=[1, 2])) == 0b010

    balance = ledger.balance()
    assert (balance.admitted, balance.in_flight) == (4, 3)
    assert balance.reasons["rejected"] == {"in flight already": 1}


def test_what_the_run_before_trained_is_rejected_trained_already() -> None:
    ledger = Ledger()
    ledger.restore({A: 0b01}, step=5)

    assert ledger.take_over(group(instance_id="a")) == ledger.hand_over(group(instance_id="a", repetition_ids=[0, 2]))

    assert ledger.balance().reasons["rejected"] == {"trained already": 2}
    assert ledger.in_flight == 2


def test_what_ended_otherwise_may_come_again_and_is_judged_anew() -> None:
    ledger = ledger_with(A)
    ledger.end(group(instance_id="a"), "stale", "old")

    assert ledger.take_over(group(instance_id="a")) == 0

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
    assert not ledger._begun


@pytest.mark.parametrize("enter", ["hand_over", "take_over"])
def test_a_batch_with_a_copy_is_an_imbalance_for_it_cannot_go_on_without_it(enter: str) -> None:
    ledger = Ledger()
    ledger.hand_over(group(instance_id="a"))
    before = ledger.balance()

    with pytest.raises(
        LedgerImbalance, match=r"test/a repetitions \[0, 1\] is in flight or was trained, and arrives again"
    ):
        getattr(ledger, enter)(TrainBatch.pack([group(instance_id="b"), group(instance_id="a")]))

    assert ledger.balance() == before


def test_the_copies_that_a_stage_finds_count_as_admitted_and_rejected() -> None:
    ledger = ledger_with(A)

    ledger.refuse(2, "duplicate")

    assert ledger.balance().reasons["rejected"] == {"duplicate": 2}
    assert ledger.balance().balanced
    assert ledger.in_flight == 2


# -- who listens -----------------------------------------------------------------------------------------------------


def test_a_ledger_tells_of_checkpoints_while_somebody_hears() -> None:
    ledger, heard = Ledger(), list[Mapping[GroupId, int]]()

    with ledger.on_checkpoint(heard.append):
        ledger.announce_checkpoint({A: 1})
    ledger.announce_checkpoint({B: 1})

    assert heard == [{A: 1}]


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


def test_the_pace_is_the_mean_of_what_steps_train() -> None:
    ledger = Ledger()
    assert ledger.trained_per_step is None
    for step, names in enumerate(("a", "bc", "defg"), start=1):
        batch = TrainBatch.pack([group(instance_id=name) for name in names])
        for name in names:
            ledger.admit(GroupId("test", name), range(2))
        ledger.commit(batch, step)
    assert ledger.trained_per_step == pytest.approx((2 + 4 + 8) / 3)


class TestTwoProcesses:
    """A worker's ledger with its account, and the trainer's, joined as a channel joins them."""

    def setup_method(self) -> None:
        self.page = bytearray(COUNTERS_BYTES)
        self.worker = Ledger(SharedCounters(self.page))
        self.account = SharedCounters(self.page, "worker 0")
        self.trainer = Ledger()
        self.trainer.attach_counters(self.account)

    def hand_over(self, name: str) -> None:
        self.trainer.take_over(group(instance_id=name), self.worker.settle, self.account)

    def balanced(self) -> dict[str, int]:
        balance = self.trainer.balance()
        assert balance.balanced
        return {"admitted": balance.admitted, "in_flight": balance.in_flight} | {
            k: v for k, v in balance.ended.items() if v
        }

    def test_the_books_balance_while_a_trajectory_crosses(self) -> None:
        self.worker.admit(A, range(2))
        assert self.balanced() == {"admitted": 2, "in_flight": 2}
        self.hand_over("a")
        assert self.balanced() == {"admitted": 2, "in_flight": 2}
        self.trainer.commit(TrainBatch.pack([group(instance_id="a")]), step=1)
        assert self.balanced() == {"admitted": 2, "in_flight": 0, "trained": 2}

    def test_the_worker_hears_of_the_end_and_has_room_again(self) -> None:
        self.worker.admit(A, range(2))
        self.hand_over("a")
        assert self.worker.in_flight == 2
        self.trainer.commit(TrainBatch.pack([group(instance_id="a")]), step=3)
        assert self.worker.in_flight == 0
        assert self.worker.step == 3
        assert self.worker.trained_per_step == 2

    def test_the_workers_own_books_balance_when_its_trajectories_end_elsewhere(self) -> None:
        self.worker.admit(A, range(2))
        self.hand_over("a")

        self.trainer.end(group(instance_id="a"), "stale", "old")

        assert self.worker.balance().ended["stale"] == 2
        assert self.worker.balance().balanced
        assert not self.worker.balance().reasons["stale"]  # told in the trainer's books, once

    def test_workers_that_share_a_prompt_each_hear_of_what_they_sampled(self) -> None:
        other = Ledger(SharedCounters(bytearray(COUNTERS_BYTES)))
        first, second = group(instance_id="a", repetition_ids=[0, 1]), group(instance_id="a", repetition_ids=[2, 3])
        for ledger, sampled in ((self.worker, first), (other, second)):
            ledger.admit(A, sampled.repetition_ids.tolist())
            self.trainer.take_over(sampled, ledger.settle)

        self.trainer.commit(TrainBatch.pack([first]), step=1)
        assert (self.worker.in_flight, other.in_flight) == (0, 2)
        self.trainer.end(second, "stale", "old")
        assert (self.worker.in_flight, other.in_flight) == (0, 0)

    def test_a_copy_leaves_the_account_of_its_worker_which_is_told_at_once(self) -> None:
        self.trainer.hand_over(group(instance_id="a"))
        self.worker.admit(A, range(3))

        self.trainer.take_over(group(instance_id="a"), self.worker.settle, self.account)

        assert self.worker.in_flight == 1
        assert self.balanced() == {"admitted": 5, "in_flight": 3, "rejected": 2}
        assert self.trainer.detach_counters(self.account, "killed") == 1
        assert self.balanced() == {"admitted": 5, "in_flight": 2, "rejected": 2, "lost": 1}

    def test_a_worker_is_not_told_of_what_another_sampled_when_its_own_had_ended(self) -> None:
        told: list[tuple[GroupId, int, EndState, int]] = []
        self.trainer.take_over(group(instance_id="a"), lambda *ended: told.append(ended))
        again = group(instance_id="a").select(np.array([True, False]))
        self.trainer.end(again, "stale", "old")

        self.trainer.take_over(again, lambda *_: None)
        self.trainer.end(again, "filtered", "")

        assert told == [(A, 0b01, "stale", 0)]

    def test_what_a_worker_sends_twice_is_rejected_in_the_worker(self) -> None:
        record = group(instance_id="a")
        assert (self.worker.hand_over(record), self.worker.hand_over(record)) == (0, 0b11)
        self.hand_over("a")

        assert self.balanced() == {"admitted": 4, "in_flight": 2, "rejected": 2}

    def test_what_ends_in_the_worker_counts_in_the_trainers_books(self) -> None:
        self.worker.admit(A, range(2))
        self.worker.end(group(instance_id="a").ids[:1], "failed", "the environment raised")
        assert self.balanced() == {"admitted": 2, "in_flight": 1, "failed": 1}
        assert self.trainer.balance().reasons["failed"] == {"in worker 0": 1}

    @pytest.mark.parametrize("handed_over", [True, False])
    def test_what_a_dead_worker_held_is_lost_and_what_it_handed_over_goes_on(self, handed_over: bool) -> None:  # noqa: FBT001
        self.worker.admit(A, range(2))
        self.worker.admit(B, range(3))
        if handed_over:
            self.hand_over("a")

        lost = self.trainer.detach_counters(self.account, "worker 0 was killed by SIGKILL")

        assert lost == (3 if handed_over else 5)
        assert self.balanced() == {"admitted": 5, "in_flight": 5 - lost, "lost": lost}
        assert self.trainer.balance().reasons["lost"] == {"worker 0 was killed by SIGKILL": lost}

    def test_closing_an_account_twice_counts_once(self) -> None:
        self.worker.admit(A, range(2))
        assert self.trainer.detach_counters(self.account, "killed") == 2
        assert self.trainer.detach_counters(self.account, "killed") == 0
        assert self.balanced() == {"admitted": 2, "in_flight": 0, "lost": 2}

    def test_a_restarted_worker_is_not_confused_by_its_predecessors_trajectories(self) -> None:
        successor = Ledger(SharedCounters(bytearray(COUNTERS_BYTES)))
        successor.settle(A, 0b11, "trained", 7)
        assert successor.in_flight == 0
        assert successor.step == 7

    def test_at_the_end_of_a_run_whatever_is_left_is_lost_by_name(self) -> None:
        self.worker.admit(A, range(2))
        self.worker.admit(B, range(2))
        self.hand_over("a")
        assert self.trainer.lose("the run was stopped") == 4
        assert self.balanced() == {"admitted": 4, "in_flight": 0, "lost": 4}


def test_a_group_from_a_stranger_is_admitted_where_it_arrives() -> None:
    ledger, told = Ledger(), list[tuple[GroupId, int, EndState, int]]()
    ledger.take_over(group(instance_id="a"), lambda *ended: told.append(ended))
    ledger.end(group(instance_id="a"), "stale", "old")
    assert ledger.balance().admitted == 2
    assert told == [(A, 0b11, "stale", 0)]


def test_without_a_pipeline_whatever_ends_counts_as_admitted() -> None:
    ledger = Ledger(admits_on_end=True)
    ledger.end(group(), "filtered", "x")
    ledger.commit(TrainBatch.pack([group(instance_id="a")]), step=1)
    ledger.end(group(instance_id="a"), "rejected", "it came again")
    assert ledger.balance().admitted == 6
    assert ledger.balance().balanced
