"""What the gateway's queue hand out: batches, leases, and what comes back."""

from __future__ import annotations

import pytest
from tests.atropos.builders import group, next_batch, payloads, running_queue

from penstock._stages.integrations.atropos.queue.records import (
    UnknownLease,
)


def test_a_batch_that_is_not_acknowledged_in_time_is_handed_out_again_before_any_other() -> None:
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


def test_a_batch_that_is_acknowledged_is_not_handed_out_again() -> None:
    made = running_queue(batch_size=4)
    made.submit(0, [group("a")])
    batch = made.batch(0, lease_s=10)
    assert batch is not None
    made.acknowledge(9, batch.lease)

    assert next_batch(made, 10) is None
    with pytest.raises(UnknownLease, match=f"got {batch.lease}"):
        made.acknowledge(10, batch.lease)


def test_a_late_acknowledgement_counts_until_the_batch_is_out_again() -> None:
    made = running_queue(batch_size=4)
    made.submit(0, [group("a"), group("b")])
    late, later = made.batch(0, lease_s=10), made.batch(0, lease_s=10)
    assert late is not None
    assert later is not None
    made.acknowledge(11, late.lease)

    assert payloads(next_batch(made, 12)) == ["b"]
    with pytest.raises(UnknownLease):
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


def test_a_batch_that_is_given_back_is_handed_out_again_at_once() -> None:
    made = running_queue(batch_size=4)
    made.submit(0, [group("a"), group("b")])
    lost = made.batch(0, lease_s=10)
    assert lost is not None
    made.return_batch(lost.lease)
    made.return_batch(lost.lease)

    assert [payloads(next_batch(made, 0)) for _ in range(3)] == [["a"], ["b"], None]
