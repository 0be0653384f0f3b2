"""The gateway's queue, whatever happens to them: nothing is lost, nothing comes twice, memory is bounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.atropos.builders import admitted, env, group, next_batch, payloads, refused, running_queue

from penstock.errors import PenstockError

CAPACITY, CAPACITY_BYTES, LEASE_S, HEARTBEAT_TIMEOUT_S = 12, 40, 10, 25


@dataclass(frozen=True)
class Accepted:
    """A group that was accepted: in which lane, and whether it was smaller than a whole group there."""

    sent: Any
    lane: int | None
    held_back: bool


@dataclass(frozen=True)
class Out:
    """A batch that is out: the how manieth it was, its groups, and when it comes back."""

    place: int
    numbers: list[int]
    due: float


class QueueMachine(RuleBasedStateMachine):
    """An accepted group is in exactly one place: it waits, is leased, or was handed out for good."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.sizes = {0: 4, 1: 2}
        self.made = running_queue(
            env(4),
            env(2, minimum=0.3),
            capacity=CAPACITY,
            capacity_bytes=CAPACITY_BYTES,
            heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
        )
        self.submitted = 0
        self.inside: dict[int, Accepted] = {}
        """Accepted groups that were not handed out for good, by number."""
        self.out: dict[int, Out] = {}
        """Batches that were not acknowledged, by lease; those that are due are to be handed out again."""
        self.steps = 0
        self.left: dict[tuple[int | None, int], int] = {}
        """The number of the group that left last, by lane and size."""

    @rule(seconds=st.sampled_from([1.0, 6.0, 30.0]))
    def time_goes_by(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: len(self.sizes) < 4)
    @rule(size=st.sampled_from([1, 2, 4]))
    def register(self, size: int) -> None:
        self.sizes[admitted(self.made, env(size), self.now)] = size

    @rule(env_id=st.integers(0, 1))
    def ask(self, env_id: int) -> None:
        assert self.made.env_status(self.now, env_id).current_step == self.steps

    @precondition(lambda self: len(self.sizes) == 4)
    @rule(env_id=st.integers(2, 3))
    def leave(self, env_id: int) -> None:
        self.made.disconnect_env(env_id)

    @rule(
        env_id=st.none() | st.integers(0, 3),
        sizes=st.lists(st.none() | st.sampled_from([1, 2, 3, 8]), min_size=1, max_size=3),
        nbytes=st.integers(1, 5),
        lost=st.booleans(),
    )
    def submit(self, env_id: int | None, sizes: list[int | None], nbytes: int, lost: bool) -> None:  # noqa: FBT001
        lane = env_id if env_id in self.sizes else None
        whole = 4 if lane is None else self.sizes[lane]
        numbers = range(self.submitted, self.submitted + len(sizes))
        sent = [
            group(number, size or whole, env_id=env_id, nbytes=nbytes)
            for number, size in zip(numbers, sizes, strict=True)
        ]
        digest = b"%d" % self.submitted
        before = self.everything()
        try:
            receipt = self.made.submit(self.now, sent, digest=digest)
        except PenstockError:
            assert self.everything() == before
            return
        if lost:
            self.made.remember_undelivered(self.now, digest, receipt)
            assert self.made.submit(self.now, sent, digest=digest) == receipt
        self.submitted += len(sent)
        self.inside |= {
            each.payload: Accepted(each, lane, lane is not None and each.sequences < whole) for each in sent
        }

    def everything(self) -> object:
        statistics = [(each.queued, each.buffered, each.submitted) for each in self.made.environments(self.now)]
        return self.made.status(), self.made.latest, statistics

    @rule(leased=st.booleans())
    def batch(self, leased: bool) -> None:  # noqa: FBT001
        back = min((out for out in self.out.values() if out.due <= self.now), key=lambda out: out.place, default=None)
        batch = self.made.batch(self.now, lease_s=LEASE_S)
        if batch is None:
            assert back is None
            return
        assert sum(each.sequences for each in batch.groups) == 8
        numbers = [each.payload for each in batch.groups]
        if back is not None:
            assert numbers == back.numbers
            self.out = {lease: out for lease, out in self.out.items() if out is not back}
        else:
            self.steps += 1
            self.leave_the_queue(numbers)
        if not leased:
            self.made.acknowledge(self.now, batch.lease)
            self.handed_out(numbers)
        else:
            self.out[batch.lease] = Out(self.steps if back is None else back.place, numbers, self.now + LEASE_S)

    def leave_the_queue(self, numbers: list[int]) -> None:
        """Remove groups, each of which waits and is the oldest of its environment and size."""
        assert not {number for out in self.out.values() for number in out.numbers} & set(numbers)
        for number in numbers:
            accepted = self.inside[number]
            if not accepted.held_back:
                kind = accepted.lane, accepted.sent.sequences
                assert number > self.left.get(kind, -1)
                self.left[kind] = number

    def handed_out(self, numbers: list[int]) -> None:
        for number in numbers:
            del self.inside[number]

    @precondition(lambda self: self.out)
    @rule(pick=st.integers(0, 10))
    def acknowledge(self, pick: int) -> None:
        lease = sorted(self.out)[pick % len(self.out)]
        self.made.acknowledge(self.now, lease)
        self.handed_out(self.out.pop(lease).numbers)
        with refused(404, "lease of an outstanding batch"):
            self.made.acknowledge(self.now, lease)

    @rule()
    def take(self) -> None:
        one = self.made.take(self.now)
        if one is not None:
            self.leave_the_queue([one.payload])
            self.handed_out([one.payload])

    @invariant()
    def holds_what_it_accepted_and_no_more_than_it_may(self) -> None:
        assert (self.made.status().current_step, self.made._groups.held) == (self.steps, len(self.inside))
        assert len(self.inside) <= CAPACITY
        assert sum(each.sent.nbytes for each in self.inside.values()) == self.made._bytes.held <= CAPACITY_BYTES

    def teardown(self) -> None:
        """Assert that all groups are handed out, except for buffered parts of a whole group."""
        self.now += LEASE_S
        self.made.expire(self.now)
        for _ in range(len(self.out)):
            self.batch(leased=False)
        for _ in range(self.made.status().queue_size):
            self.take()
        assert self.made.status().queue_size == 0
        buffered = sum(each.buffered for each in self.made.environments(self.now))
        assert sum(each.sent.sequences for each in self.inside.values()) == buffered
        assert all(each.held_back for each in self.inside.values())


TestTrajectoryQueue = QueueMachine.TestCase
TestTrajectoryQueue.settings = settings(max_examples=40, stateful_step_count=40)


# -- what is handed out ------------------------------------------------------------------------------------------------


def test_a_batch_that_is_not_acknowledged_in_time_is_leased_again_before_any_other() -> None:
    made = running_queue(batch_size=4)
    made.submit(0, [group("a"), group("b"), group("c")])
    leases = [made.batch(now, lease_s=10 - 2 * now) for now in (0, 1)]

    assert [payloads(each) for each in leases] == [["a"], ["b"]]
    assert [payloads(next_batch(made, 10)) for _ in range(4)] == [["a"], ["b"], ["c"], None]
    assert made.status().current_step == 3


def test_a_lease_ends_in_its_own_time_however_long_others_are() -> None:
    made = running_queue(batch_size=4)
    made.submit(0, [group("a"), group("b")])
    for lease_s in (10, 100):
        made.batch(0, lease_s=lease_s)

    assert [payloads(next_batch(made, now)) for now in (9, 10, 99, 100)] == [None, ["a"], None, ["b"]]


def test_a_batch_that_is_acknowledged_is_not_leased_again() -> None:
    made = running_queue(batch_size=4)
    made.submit(0, [group("a")])
    batch = made.batch(0, lease_s=10)
    assert batch is not None
    made.acknowledge(9, batch.lease)

    assert next_batch(made, 10) is None
    with refused(404, f"got {batch.lease}"):
        made.acknowledge(10, batch.lease)


def test_a_late_acknowledgement_counts_until_the_batch_is_out_again() -> None:
    made = running_queue(batch_size=4)
    made.submit(0, [group("a"), group("b")])
    late, later = made.batch(0, lease_s=10), made.batch(0, lease_s=10)
    assert late is not None
    assert later is not None
    made.acknowledge(11, late.lease)

    assert payloads(next_batch(made, 12)) == ["b"]
    with refused(404, "lease of an outstanding batch"):
        made.acknowledge(13, later.lease)


def test_a_batch_is_outstanding_until_it_is_acknowledged() -> None:
    made = running_queue(batch_size=4)
    made.submit(0, [group("a"), group("b"), group("c")])
    first, second = made.batch(0, lease_s=10), made.batch(0, lease_s=100)
    assert first is not None
    assert second is not None
    outstanding = [made.outstanding]
    made.expire(10)
    outstanding.append(made.outstanding)  # one came back
    acknowledged = [payloads(made.acknowledge(10, lease)) for lease in (first.lease, second.lease)]

    assert outstanding == [2, 2]
    assert acknowledged == [["a"], ["b"]]
    assert made.outstanding == 0


def test_a_batch_that_is_returned_is_leased_again_at_once() -> None:
    made = running_queue(batch_size=4)
    made.submit(0, [group("a"), group("b")])
    lost = made.batch(0, lease_s=10)
    assert lost is not None
    made.return_batch(lost.lease)
    made.return_batch(lost.lease)

    assert [payloads(next_batch(made, 0)) for _ in range(3)] == [["a"], ["b"], None]
