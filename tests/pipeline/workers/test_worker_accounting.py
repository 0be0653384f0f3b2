"""The run's accounting of records in workers, without processes."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from penstock import GroupId, TrainBatch, TrajectoryGroup, TrajectoryId
from penstock._pipeline.accounting.shared_counters import COUNTERS_BYTES, SharedCounters
from penstock._pipeline.accounting.telemetry import Observations
from penstock._pipeline.channels.peer import Peer
from penstock._pipeline.graph.context import Worker as Place
from penstock._pipeline.graph.edge import EdgeCounter
from penstock._pipeline.workers.worker_accounting import WorkerAccounting
from penstock._pipeline.workers.worker_messages import Ending, WorkerEndState, WorkerReport
from penstock._schemas.bounds import MOST_NAMES
from penstock._schemas.control import PROTOCOL_VERSION, Connect
from penstock.accounting import EndState, Ledger, Metrics
from penstock.errors import LedgerImbalance, PeerLost, ProtocolMismatch
from penstock.testing import group

WORKER = "Sample 1/2"
KILLED = "Sample 1/2 (pid 7) was killed by SIGKILL"


def peer(name: str = WORKER) -> Peer:
    return Peer(Connect(PROTOCOL_VERSION, "shm", "group", b"identity", name, 7), lambda _: None, 1)


def report(
    observations: Observations | None = None,
    endings: list[Ending] | None = None,
    reasons: dict[WorkerEndState, dict[str, int]] | None = None,
) -> bytes:
    return msgspec.msgpack.encode(WorkerReport(observations, tuple(endings or ()), reasons or {}))


class Source:
    """A source's worker as the accounting sees it: it writes its page, and its records are received."""

    def __init__(self) -> None:
        self.ledger, self.metrics, self.counter = Ledger(), Metrics(), EdgeCounter()
        self.accounting = WorkerAccounting(self.ledger, self.metrics, self.counter, source=True)
        fd = self.accounting.open(WORKER)
        self._memory = mmap.mmap(fd, mmap.PAGESIZE)
        self.account = SharedCounters(self._memory)
        os.close(fd)

    def close(self) -> None:
        self.account.close()
        self._memory.close()
        self.accounting.close("unfinished", "the run ended")

    def sends(self, record: TrajectoryGroup) -> None:
        self.account.admit(len(record))
        self.accounting.received(peer(), record)


@pytest.fixture
def source() -> Iterator[Source]:
    made = Source()
    yield made
    made.close()


def test_samples_of_a_worker_are_in_flight_before_they_are_received(source: Source) -> None:
    source.account.admit(8)

    assert source.ledger.balance().in_flight == 8


def test_received_records_are_in_the_ledger_and_counted_once(source: Source) -> None:
    source.sends(group())

    assert source.ledger.balance().in_flight == source.ledger.in_flight == source.counter.trajectories == 2


def test_only_the_new_part_of_a_repeated_record_passes(source: Source) -> None:
    source.sends(group(repetition_ids=[0, 1]))
    source.account.admit(4)

    rest = source.accounting.received(peer(), group(repetition_ids=[1, 2]))
    nothing = source.accounting.received(peer(), group(repetition_ids=[0, 2]))

    assert rest.repetition_ids.tolist() == [2]
    assert nothing is None
    assert source.counter.trajectories == source.ledger.balance().in_flight == 3
    assert source.ledger.balance().reasons["rejected"] == {"in flight already": 3}


@pytest.mark.parametrize("drained_first", [True, False])
def test_records_of_a_dead_worker_are_lost_once_all_that_it_sent_was_received(
    source: Source,
    drained_first: bool,  # noqa: FBT001 (a parameter)
) -> None:
    source.sends(group())
    source.account.admit(3)
    steps: list[Callable[[], None]] = [
        lambda: source.accounting.lost(peer(), PeerLost()),
        lambda: source.accounting.ended(WORKER, KILLED),
    ]
    first, second = steps if drained_first else reversed(steps)

    first()
    assert source.ledger.balance().ended["lost"] == 0
    second()

    balance = source.ledger.balance()
    assert balance.reasons["lost"] == {KILLED: 3}
    assert (balance.admitted, balance.in_flight) == (5, 2)


def test_the_page_of_a_worker_that_died_before_it_connected_is_not_kept(source: Source) -> None:
    pages = _mapped_pages()
    os.close(source.accounting.open("a second worker"))

    source.accounting.ended("a second worker", KILLED, connected=False)

    assert _mapped_pages() == pages


def _mapped_pages() -> int:
    return Path("/proc/self/maps").read_text().count("account")


def test_the_reasons_of_ends_in_a_worker_are_those_that_it_has_reported(source: Source) -> None:
    source.account.admit(5)
    source.account.end("failed", 3)
    source.account.end("filtered", 1)

    source.accounting.observed(peer(), report(reasons={"failed": {"timeout": 2}}))

    balance = source.ledger.balance()
    assert balance.reasons["failed"] == {"timeout": 2, "reason not reported": 1}
    assert balance.reasons["filtered"] == {"reason not reported": 1}
    assert balance.balanced


@pytest.mark.parametrize(("returned", "end"), [(True, "unfinished"), (False, "lost")])
def test_a_run_that_ends_before_all_was_received_did_not_need_it(source: Source, *, returned: bool, end: str) -> None:
    source.account.admit(8)
    source.accounting.ended(WORKER, "it ended", unaccounted_by=WORKER if returned else "")

    source.accounting.close("unfinished", "the run ended")

    assert source.ledger.balance().ended[end] == 8
    assert not source.ledger.unaccounted


def test_reasons_outlive_their_worker(source: Source) -> None:
    source.account.admit(2)
    source.account.end("failed", 2)
    source.accounting.observed(peer(), report(reasons={"failed": {"timeout": 2}}))

    source.accounting.close("unfinished", "the run ended")

    assert source.ledger.balance().reasons["failed"] == {"timeout": 2}


def test_metrics_of_a_worker_join_those_of_the_run(source: Source) -> None:
    source.accounting.observed(peer(), report(Observations({"reward": (3.0, 2.0)}, {}, {}, {}, {})))

    assert source.metrics.emit(1)["reward"] == 1.5


def test_a_report_that_is_none_is_refused_as_a_breach_of_the_protocol(source: Source) -> None:
    with pytest.raises(ProtocolMismatch, match="expected the report of a worker from Sample 1/2"):
        source.accounting.observed(peer(), b"no news")


def test_a_sender_that_is_no_worker_is_admitted_here(source: Source) -> None:
    source.accounting.received(peer("a stranger"), group())

    assert source.ledger.balance().admitted == 2


class Middle:
    """A middle stage's worker as the accounting sees it."""

    def __init__(self) -> None:
        self.ledger, self.counter = Ledger(), EdgeCounter()
        self.accounting = WorkerAccounting(self.ledger, Metrics(), self.counter, source=False)
        os.close(self.accounting.open(WORKER))
        self.group = group(completion_lengths=[1, 2, 3])
        self.ledger.admit(self.group.id, [0, 1, 2])
        self.accounting.handed(WORKER, self.group)


def test_records_returned_by_a_middle_worker_are_not_lost_with_it() -> None:
    middle = Middle()

    middle.accounting.received(peer(), middle.group)
    middle.accounting.lost(peer(), PeerLost())
    middle.accounting.ended(WORKER, KILLED)

    assert middle.ledger.balance().ended["lost"] == 0
    assert middle.counter.trajectories == 3


def test_records_dropped_by_a_middle_worker_end_with_their_reason_and_the_rest_is_lost() -> None:
    middle = Middle()

    middle.accounting.observed(peer(), report(endings=[Ending(middle.group.id, (0, 2), "filtered", "too short")]))
    middle.accounting.ended(WORKER, KILLED)
    middle.accounting.closed(peer())

    balance = middle.ledger.balance()
    assert balance.reasons["filtered"] == {"too short": 2}
    assert balance.reasons["lost"] == {KILLED: 1}


def test_a_worker_cannot_end_records_that_it_was_not_handed() -> None:
    middle = Middle()
    other = group(instance_id="other")
    middle.ledger.admit(other.id, [0, 1])

    middle.accounting.observed(peer(), report(endings=[Ending(other.id, (0, 1), "filtered", "not its own")]))

    assert middle.ledger.balance().ended["filtered"] == 0


def joined(ledger: Ledger, metrics: Metrics) -> WorkerAccounting:
    """Return the accounting of workers that join and are told what to sample, one of which has the first place."""
    accounting = WorkerAccounting(ledger, metrics, EdgeCounter(), source=False, assigned=True)
    accounting.open_reported(WORKER, Place(0, 1))
    return accounting


def test_a_worker_that_has_joined_names_no_more_others_than_it_was_given() -> None:
    ledger, record = Ledger(), group(completion_lengths=[3, 3])
    accounting = joined(ledger, Metrics())
    ledger.admit(record.id, [0, 1])
    accounting.assigned(WORKER, record.id, 0b11)
    own, other = (
        Ending(GroupId(record.id.env, name), (0, 1), "failed", "") for name in (record.id.instance_id, "other")
    )

    accounting.observed(peer(), report(endings=[own, own]))  # a stage that drops one twice
    with pytest.raises(ProtocolMismatch, match="2 in all, got 4 of others"):
        accounting.observed(peer(), report(endings=[other]))

    assert ledger.balance().ended["failed"] == 2


def gauges(first: int, count: int) -> bytes:
    return report(Observations(gauges={str(name): 1.0 for name in range(first, first + count)}))


def test_the_metrics_of_a_place_stay_within_the_bound_of_one_worker_however_often_it_is_taken() -> None:
    metrics = Metrics()
    accounting = joined(Ledger(), metrics)
    for restart in range(3):
        accounting.observed(peer(), gauges(restart * MOST_NAMES, MOST_NAMES))
        accounting.ended(WORKER, KILLED, connected=False)
        accounting.open_reported(WORKER, Place(0, 1, restart + 1))

    found = metrics.emit(1)
    assert len(found) <= MOST_NAMES + 1  # and the time of the step
    assert str(3 * MOST_NAMES - 1) in found


def test_the_metrics_of_a_worker_that_joins_again_go_on() -> None:
    metrics = Metrics()
    accounting = joined(Ledger(), metrics)
    accounting.observed(peer(), report(Observations(totals={"tokens": 3.0})))
    accounting.ended(WORKER, KILLED, connected=False)
    accounting.open_reported(WORKER, Place(0, 1, 1))
    accounting.observed(peer(), report(Observations(totals={"tokens": 4.0})))

    assert metrics.emit(1)["tokens"] == 7.0


def test_a_record_whose_sending_failed_is_not_counted_to_the_worker() -> None:
    middle = Middle()

    middle.accounting.returned(WORKER, middle.group)
    middle.accounting.close("unfinished", "the run ended")

    assert middle.ledger.in_flight == 3


@pytest.mark.parametrize("is_source", [True, False])
def test_closing_twice_is_fine(is_source: bool) -> None:  # noqa: FBT001 (a parameter)
    ledger = Ledger()
    accounting = WorkerAccounting(ledger, Metrics(), EdgeCounter(), source=is_source)
    os.close(accounting.open(WORKER))

    accounting.close("unfinished", "the run ended")
    accounting.close("unfinished", "the run ended")

    assert ledger.balance().in_flight == 0


def test_an_ended_trajectory_has_ended_however_late_the_rest_of_its_group_ends() -> None:
    middle = Middle()
    middle.accounting.close("unfinished", "the run ended")

    with pytest.raises(LedgerImbalance, match="is not in flight"):
        middle.ledger.end([TrajectoryId(*middle.group.id, 0)], "trained")


A, B = GroupId("test", "a"), GroupId("test", "b")


class TestTwoProcesses:
    """A worker's ledger with its account, and the trainer's, joined as a channel joins them."""

    def setup_method(self) -> None:
        self.page = bytearray(COUNTERS_BYTES)
        self.worker = Ledger(SharedCounters(self.page))
        self.account = SharedCounters(self.page)
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

    def test_the_ledger_balances_while_a_trajectory_is_in_transit(self) -> None:
        self.worker.admit(A, range(2))
        assert self.balanced() == {"admitted": 2, "in_flight": 2}
        self.hand_over("a")
        assert self.balanced() == {"admitted": 2, "in_flight": 2}
        self.trainer.commit(TrainBatch.pack([group(instance_id="a")]), step=1)
        assert self.balanced() == {"admitted": 2, "in_flight": 0, "trained": 2}

    def test_an_end_is_reported_to_the_worker_and_frees_its_allowance(self) -> None:
        self.worker.admit(A, range(2))
        self.hand_over("a")
        assert self.worker.in_flight == 2
        self.trainer.commit(TrainBatch.pack([group(instance_id="a")]), step=3)
        assert self.worker.in_flight == 0
        assert self.worker.step == 3
        assert self.worker.trained_per_step == 2

    def test_the_ledger_of_a_worker_balances_when_its_trajectories_end_elsewhere(self) -> None:
        self.worker.admit(A, range(2))
        self.hand_over("a")

        self.trainer.end(group(instance_id="a"), "stale", "old")

        assert self.worker.balance().ended["stale"] == 2
        assert self.worker.balance().balanced
        assert not self.worker.balance().reasons["stale"]  # counted once, in the trainer's ledger

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

    def test_a_copy_is_removed_from_the_counters_of_its_worker_which_is_notified(self) -> None:
        self.trainer.hand_over(group(instance_id="a"))
        self.worker.admit(A, range(3))

        self.trainer.take_over(group(instance_id="a"), self.worker.settle, self.account)

        assert self.worker.in_flight == 1
        assert self.balanced() == {"admitted": 5, "in_flight": 3, "rejected": 2}
        assert self.trainer.detach_counters(self.account, "lost", "killed") == 1
        assert self.balanced() == {"admitted": 5, "in_flight": 2, "rejected": 2, "lost": 1}

    def test_a_worker_is_not_notified_of_trajectories_of_another_worker(self) -> None:
        outcomes: list[tuple[GroupId, int, EndState, int]] = []
        self.trainer.take_over(group(instance_id="a"), lambda *ended: outcomes.append(ended))
        again = group(instance_id="a").select(np.array([True, False]))
        self.trainer.end(again, "stale", "old")

        self.trainer.take_over(again, lambda *_: None)
        self.trainer.end(again, "filtered", "")

        assert outcomes == [(A, 0b01, "stale", 0)]

    def test_a_record_that_a_worker_sends_twice_is_rejected_in_the_worker(self) -> None:
        record = group(instance_id="a")
        assert (self.worker.hand_over(record), self.worker.hand_over(record)) == (0, 0b11)
        self.hand_over("a")

        assert self.balanced() == {"admitted": 4, "in_flight": 2, "rejected": 2}

    def test_trajectories_that_end_in_the_worker_count_in_the_trainers_ledger(self) -> None:
        self.worker.admit(A, range(2))
        self.worker.end(group(instance_id="a").ids[:1], "failed", "the environment raised")
        assert self.balanced() == {"admitted": 2, "in_flight": 1, "failed": 1}
        assert self.trainer.balance().reasons["failed"] == {"reason not reported": 1}

    @pytest.mark.parametrize("handed_over", [True, False])
    def test_records_of_a_dead_worker_are_lost_and_those_it_sent_continue(self, handed_over: bool) -> None:  # noqa: FBT001
        self.worker.admit(A, range(2))
        self.worker.admit(B, range(3))
        if handed_over:
            self.hand_over("a")

        lost = self.trainer.detach_counters(self.account, "lost", "worker 0 was killed by SIGKILL")

        assert lost == (3 if handed_over else 5)
        assert self.balanced() == {"admitted": 5, "in_flight": 5 - lost, "lost": lost}
        assert self.trainer.balance().reasons["lost"] == {"worker 0 was killed by SIGKILL": lost}

    def test_closing_an_account_twice_counts_once(self) -> None:
        self.worker.admit(A, range(2))
        assert self.trainer.detach_counters(self.account, "lost", "killed") == 2
        assert self.trainer.detach_counters(self.account, "lost", "killed") == 0
        assert self.balanced() == {"admitted": 2, "in_flight": 0, "lost": 2}

    def test_a_restarted_worker_is_not_confused_by_its_predecessors_trajectories(self) -> None:
        successor = Ledger(SharedCounters(bytearray(COUNTERS_BYTES)))
        successor.settle(A, 0b11, "trained", 7)
        assert successor.in_flight == 0
        assert successor.step == 7

    def test_at_the_end_of_a_run_the_remaining_trajectories_are_lost_by_name(self) -> None:
        self.worker.admit(A, range(2))
        self.worker.admit(B, range(2))
        self.hand_over("a")
        assert self.trainer.end_all("unfinished", "the run was stopped") == 4
        assert self.balanced() == {"admitted": 4, "in_flight": 0, "unfinished": 4}
