"""Records of all senders are taken in the order in which they arrived, and those of each follow each other."""

from __future__ import annotations

import pytest

from penstock._pipeline.channels.arrival_queue import ArrivalQueue
from penstock._pipeline.channels.peer import Peer
from penstock._schemas.control import PROTOCOL_VERSION, Connect
from penstock._schemas.descriptor import Descriptor
from penstock.errors import StaleDescriptor


def a_peer(name: str = "worker 0") -> Peer:
    return Peer(Connect(PROTOCOL_VERSION, "shm", "group", name.encode(), name, 7), lambda _: None, 32)


def bundle(last: int, records: int) -> tuple[Descriptor, tuple[()]]:
    """Return the bundle of `records` that ends with record `last`."""
    return Descriptor(sequence=last, records=records, slot=0, slots=1, generation=1, nbytes=64), ()


def test_a_bundle_is_the_first_one_until_all_of_its_records_are_taken() -> None:
    arrivals, first, second = ArrivalQueue(), a_peer("worker 0"), a_peer("worker 1")
    arrivals.add(first, bundle(2, records=2))
    arrivals.add(second, bundle(1, records=1))

    arrivals.advance(*arrivals.events[0], 1)  # type: ignore[arg-type]
    assert arrivals.events[0][0] is first
    assert (arrivals.index, arrivals.queued) == (1, 2)

    arrivals.advance(*arrivals.events[0], 1)  # type: ignore[arg-type]
    assert arrivals.events[0][0] is second
    assert (arrivals.index, arrivals.queued, first.taken) == (0, 1, 2)


@pytest.mark.parametrize(("last", "records"), [(3, 0), (3, 2), (2, 1), (5, 1)])
def test_a_bundle_that_does_not_hold_the_next_records_of_its_sender_is_refused(last: int, records: int) -> None:
    arrivals, peer = ArrivalQueue(), a_peer()
    arrivals.add(peer, bundle(3, records=3))

    with pytest.raises(StaleDescriptor, match="expected record 4 of worker 0"):
        arrivals.add(peer, bundle(last, records))

    assert (peer.sequence, arrivals.queued) == (3, 3)
