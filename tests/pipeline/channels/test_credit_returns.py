"""A receiver returns credit to its senders, also for records that another thread releases meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import anyio.lowlevel

from penstock._pipeline.channels.credit_returns import COALESCE_TICKS, CreditReturner
from penstock._pipeline.channels.peer import Peer
from penstock._schemas.control import PROTOCOL_VERSION, Connect, CreditGrant, Message
from penstock._schemas.descriptor import Descriptor

RECORD = Descriptor(sequence=1, records=1, slot=0, slots=1, generation=1, nbytes=64)


class Watched(Peer):
    """A peer whose last record is released just after the loop has counted the releases, as another thread may do."""

    late: Descriptor | None = RECORD

    def collect_releases(self) -> None:
        super().collect_releases()
        if self.late is not None:
            released, self.late = self.late, None
            self.release(released, 1)


def a_peer(kind: Callable[..., Peer], answers: CreditReturner) -> Peer:
    return kind(Connect(PROTOCOL_VERSION, "shm", "group", b"identity", "worker 0", 7), answers.schedule, 32)


async def test_credit_released_by_another_thread_reaches_a_sender_that_waits() -> None:
    sent: list[Message] = []
    answers = CreditReturner(lambda _, message: sent.append(message))
    peer = a_peer(Watched, answers)
    peer.credit_requested = True
    answers.schedule(peer)

    for _ in range(2 * COALESCE_TICKS):
        await anyio.lowlevel.checkpoint()

    assert sent == [CreditGrant(((0, 1, 1),))]


async def test_a_sender_that_requests_no_credit_receives_it_in_batches() -> None:
    sent: list[Message] = []
    answers = CreditReturner(lambda _, message: sent.append(message))
    peer = a_peer(Peer, answers)

    for _ in range(31):
        peer.release(RECORD, 1)
    for _ in range(2 * COALESCE_TICKS):
        await anyio.lowlevel.checkpoint()
    assert sent == []

    peer.release(RECORD, 1)
    await anyio.lowlevel.checkpoint()
    await anyio.lowlevel.checkpoint()
    assert sent == [CreditGrant(((0, 1, 1),) * 32)]
