"""The run's accounting of records in workers, without processes."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from penstock import GroupId, TrajectoryGroup, TrajectoryId
from penstock._pipeline.accounting.epoch import UNKNOWN, Epoch
from penstock._pipeline.accounting.telemetry import Observations
from penstock._pipeline.channels.peer import Peer
from penstock._pipeline.graph.context import Worker as Place
from penstock._pipeline.graph.edge import EdgeCounter
from penstock._pipeline.workers.worker_accounting import WorkerAccounting
from penstock._pipeline.workers.worker_messages import Ending, Joins, WorkerReport
from penstock._schemas.bounds import MOST_NAMES
from penstock._schemas.control import PROTOCOL_VERSION, Connect
from penstock.accounting import Ledger, Metrics
from penstock.errors import LedgerImbalance, PeerLost, ProtocolMismatch
from penstock.testing import group

WORKER = "Sample 1/2"
KILLED = "Sample 1/2 (pid 7) was killed by SIGKILL"
FIRST = Place(0, 1)
A, B = GroupId("test", "a"), GroupId("test", "b")


def peer(name: str = WORKER) -> Peer:
    return Peer(Connect(PROTOCOL_VERSION, "shm", "group", b"identity", name, 7), lambda _: None, 1)


def report(
    observations: Observations | None = None,
    endings: list[Ending] | None = None,
    *,
    succeeded: int = 0,
    epoch: Epoch = UNKNOWN,
) -> bytes:
    return msgspec.msgpack.encode(WorkerReport(observations, tuple(endings or ()), succeeded=succeeded, epoch=epoch))


class Source:
    """A worker of a source that samples by itself, as the accounting sees it."""

    def __init__(self) -> None:
        self.ledger, self.metrics, self.counter = Ledger(), Metrics(), EdgeCounter()
        self.accounting = WorkerAccounting(self.ledger, self.metrics, self.counter, source=True)
        self.accounting.open(WORKER, FIRST)

    def sends(self, record: TrajectoryGroup) -> None:
        self.accounting.received(peer(), record)

    def drops(self, *endings: Ending) -> None:
        self.accounting.observed(peer(), report(endings=list(endings)))


@pytest.fixture
def source() -> Source:
    return Source()


# -- a source whose prompts are not assigned ---------------------------------------------------------------------------


def test_received_records_are_admitted_and_counted_once(source: Source) -> None:
    source.sends(group())

    assert source.ledger.balance().admitted == source.ledger.in_flight == source.counter.trajectories == 2


def test_only_the_new_part_of_a_repeated_record_passes(source: Source) -> None:
    source.sends(group(rollout_ids=[0, 1]))

    rest = source.accounting.received(peer(), group(rollout_ids=[1, 2]))
    nothing = source.accounting.received(peer(), group(rollout_ids=[0, 2]))

    assert rest.rollout_ids.tolist() == [2]
    assert nothing is None
    assert source.counter.trajectories == source.ledger.balance().in_flight == 3
    assert source.ledger.balance().reasons["rejected"] == {"in flight already": 3}


def test_what_a_worker_dropped_before_it_was_sent_counts_with_its_reason(source: Source) -> None:
    source.drops(Ending(A, (0, 1), "failed", "timeout"), Ending(B, (2,), "filtered", "too long"))

    balance = source.ledger.balance()
    assert (balance.admitted, balance.in_flight) == (3, 0)
    assert balance.reasons["failed"] == {"timeout": 2}
    assert balance.reasons["filtered"] == {"too long": 1}


def test_a_worker_ends_nothing_of_what_another_one_has_sent(source: Source) -> None:
    source.sends(group(instance_id="a"))

    source.drops(Ending(A, (0, 1, 2), "failed", "timeout"))

    assert source.ledger.balance().reasons["failed"] == {"timeout": 1}
    assert source.ledger.in_flight == 2


def test_rollouts_that_succeeded_in_a_worker_count_as_soon_as_it_reports_them(source: Source) -> None:
    source.accounting.observed(peer(), report(succeeded=3))

    assert source.ledger.progress().succeeded == 3


def test_the_epoch_of_a_run_is_that_of_all_its_workers(source: Source) -> None:
    source.accounting.open("Sample 2/2", Place(1, 2))

    source.accounting.observed(peer(), report(epoch=Epoch(8)))
    source.accounting.observed(peer("Sample 2/2"), report(epoch=Epoch(16)))

    assert source.ledger.epoch == Epoch.of_all([Epoch(8), Epoch(16)])


def test_the_death_of_a_worker_loses_nothing_that_was_admitted(source: Source) -> None:
    source.sends(group())

    source.accounting.lost(peer(), PeerLost())
    source.accounting.ended(WORKER, KILLED)

    balance = source.ledger.balance()
    assert (balance.admitted, balance.in_flight, balance.ended["lost"]) == (2, 2, 0)


def test_metrics_of_a_worker_join_those_of_the_run(source: Source) -> None:
    source.accounting.observed(peer(), report(Observations({"reward": (3.0, 2.0)}, {}, {}, {}, {})))

    assert source.metrics.emit(1)["reward"] == 1.5


def test_a_report_that_is_none_is_refused_as_a_breach_of_the_protocol(source: Source) -> None:
    with pytest.raises(ProtocolMismatch, match="expected the report of a worker from Sample 1/2"):
        source.accounting.observed(peer(), b"no news")


@pytest.mark.parametrize("has_a_place", [True, False])
def test_records_of_a_sender_without_a_place_are_refused(source: Source, *, has_a_place: bool) -> None:
    source.accounting.takes = lambda _peer: not has_a_place

    with pytest.raises(ProtocolMismatch, match="expected records of a worker that has a place"):
        source.accounting.received(peer(WORKER if has_a_place else "a stranger"), group())

    assert source.ledger.balance().admitted == 0


def test_a_sender_without_a_place_may_only_ask_for_one(source: Source) -> None:
    events: list[object] = []
    source.accounting.takes = lambda _peer: False
    source.accounting.on_event = lambda _peer, event: events.append(event)

    source.accounting.observed(peer(), msgspec.msgpack.encode(WorkerReport.of(Joins())))
    with pytest.raises(ProtocolMismatch, match="expected a request for a place"):
        source.drops(Ending(A, (0,), "failed", "timeout"))

    assert events == [Joins()]
    assert source.ledger.balance().admitted == 0


# -- workers that are given their trajectories -------------------------------------------------------------------------


class Middle:
    """A middle stage's worker as the accounting sees it."""

    def __init__(self) -> None:
        self.ledger, self.counter = Ledger(), EdgeCounter()
        self.accounting = WorkerAccounting(self.ledger, Metrics(), self.counter, source=False)
        self.accounting.open(WORKER, FIRST)
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


def test_a_worker_sends_nothing_that_it_was_not_given() -> None:
    middle = Middle()

    with pytest.raises(ProtocolMismatch, match=r"got repetitions \[0, 1\] of test/other"):
        middle.accounting.received(peer(), group(instance_id="other"))

    assert middle.counter.trajectories == 0


@pytest.mark.parametrize("drained_first", [True, False])
def test_records_of_a_dead_worker_are_lost_once_all_that_it_sent_was_received(*, drained_first: bool) -> None:
    middle = Middle()
    steps: list[Callable[[], None]] = [
        lambda: middle.accounting.lost(peer(), PeerLost()),
        lambda: middle.accounting.ended(WORKER, KILLED),
    ]
    first, second = steps if drained_first else reversed(steps)

    first()
    assert middle.ledger.balance().ended["lost"] == 0
    second()

    assert middle.ledger.balance().reasons["lost"] == {KILLED: 3}
    assert middle.ledger.in_flight == 0


def test_what_a_worker_held_that_never_connected_is_lost_at_once() -> None:
    middle = Middle()

    middle.accounting.ended(WORKER, KILLED, connected=False)

    assert middle.ledger.balance().reasons["lost"] == {KILLED: 3}


@pytest.mark.parametrize(("returned", "end"), [(True, "unfinished"), (False, "lost")])
def test_a_run_that_ends_before_all_was_received_did_not_need_it(*, returned: bool, end: str) -> None:
    middle = Middle()
    middle.accounting.ended(WORKER, "it ended", unaccounted_by=WORKER if returned else "")

    middle.accounting.close("unfinished", "the run ended")

    assert middle.ledger.balance().ended[end] == 3
    assert not middle.ledger.unaccounted


def test_what_a_worker_held_whose_stage_returned_is_unaccounted_by_it() -> None:
    middle = Middle()

    middle.accounting.ended(WORKER, "it ended", unaccounted_by=WORKER)
    middle.accounting.closed(peer())

    assert middle.ledger.balance().reasons["lost"] == {"it ended": 3}
    assert middle.ledger.unaccounted == {WORKER: 3}


def assigned(ledger: Ledger, metrics: Metrics) -> WorkerAccounting:
    """Return the accounting of workers that are told what to sample, one of which has the first place."""
    accounting = WorkerAccounting(ledger, metrics, EdgeCounter(), source=True, assigned=True)
    accounting.open(WORKER, FIRST)
    return accounting


def test_what_a_dead_worker_held_stays_in_flight_where_it_is_assigned_again_and_the_rest_is_lost() -> None:
    ledger, taken_back = Ledger(), list[tuple[GroupId, int]]()
    accounting = assigned(ledger, Metrics())

    def take_back(prompt: GroupId, mask: int) -> bool:
        taken_back.append((prompt, mask))
        return prompt == A

    accounting.on_returned = take_back
    for prompt in (A, B):
        ledger.admit(prompt, [0, 1, 2])
        accounting.assigned(WORKER, prompt, 0b111)
    accounting.observed(peer(), report(endings=[Ending(A, (1,), "failed", "timeout")]))

    accounting.ended(WORKER, KILLED, connected=False)

    assert taken_back == [(A, 0b101), (B, 0b111)]
    assert ledger.trajectories.open == {A: 0b101}
    assert ledger.balance().reasons["lost"] == {KILLED: 3}
    assert accounting.groups_held == 0


def test_nothing_is_assigned_again_when_the_run_is_over() -> None:
    ledger = Ledger()
    accounting = assigned(ledger, Metrics())
    accounting.on_returned = lambda _group, _mask: True
    ledger.admit(A, [0, 1])
    accounting.assigned(WORKER, A, 0b11)

    accounting.close("unfinished", "the run ended")

    assert ledger.balance().reasons["unfinished"] == {"the run ended": 2}


def test_a_worker_has_room_until_it_holds_as_many_groups_as_it_may() -> None:
    ledger, room = Ledger(), list[bool]()
    accounting = assigned(ledger, Metrics())
    accounting.most_held = 2
    accounting.on_taken = lambda: room.append(accounting.has_room(WORKER))
    for prompt in (A, B):
        assert accounting.has_room(WORKER)
        ledger.admit(prompt, [0, 1])
        accounting.assigned(WORKER, prompt, 0b11)
    assert not accounting.has_room(WORKER)

    accounting.received(peer(), group(instance_id="a"))

    assert room == [True]
    accounting.ended(WORKER, KILLED)
    assert not accounting.has_room(WORKER)


def test_a_worker_names_no_more_others_than_it_was_given() -> None:
    ledger, record = Ledger(), group(completion_lengths=[3, 3])
    accounting = assigned(ledger, Metrics())
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
    accounting = assigned(Ledger(), metrics)
    for restart in range(3):
        accounting.observed(peer(), gauges(restart * MOST_NAMES, MOST_NAMES))
        accounting.ended(WORKER, KILLED, connected=False)
        accounting.open(WORKER, Place(0, 1, restart + 1))

    found = metrics.emit(1)
    assert len(found) <= MOST_NAMES + 1  # and the time of the step
    assert str(3 * MOST_NAMES - 1) in found


def test_the_metrics_of_a_worker_that_joins_again_go_on() -> None:
    metrics = Metrics()
    accounting = assigned(Ledger(), metrics)
    accounting.observed(peer(), report(Observations(totals={"tokens": 3.0})))
    accounting.ended(WORKER, KILLED, connected=False)
    accounting.open(WORKER, Place(0, 1, 1))
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
    accounting.open(WORKER, FIRST)

    accounting.close("unfinished", "the run ended")
    accounting.close("unfinished", "the run ended")

    assert ledger.balance().in_flight == 0


def test_an_ended_trajectory_has_ended_however_late_the_rest_of_its_group_ends() -> None:
    middle = Middle()
    middle.accounting.close("unfinished", "the run ended")

    with pytest.raises(LedgerImbalance, match="is not in flight"):
        middle.ledger.end([TrajectoryId(*middle.group.id, 0)], "trained")
