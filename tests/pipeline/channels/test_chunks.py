"""Records are taken several at a time where several are there, and never waited for beyond the first."""

from __future__ import annotations

import weakref
from itertools import pairwise

import anyio
import pytest

from penstock._pipeline.channels.chunks import MAX_CHUNK, receive_chunks, send_all
from penstock.channels import MemoryReceiver, memory_channel
from penstock.errors import PeerLost


async def test_waiting_records_are_received_at_once_in_order_and_up_to_the_limit() -> None:
    outbox, inbox = memory_channel[int](10)
    async with inbox:
        for number in range(7):
            outbox.send_nowait(number)
        await outbox.aclose()

        assert [handful async for handful in receive_chunks(inbox, 3)] == [[0, 1, 2], [3, 4, 5], [6]]


async def test_a_record_is_given_at_once_and_waits_for_no_other() -> None:
    outbox, inbox = memory_channel[int](10)
    given: list[list[int]] = []

    async def take() -> None:
        given.extend([handful async for handful in receive_chunks(inbox)])

    async with inbox, anyio.create_task_group() as tasks:
        tasks.start_soon(take)
        for number in range(3):
            await outbox.send(number)
            await anyio.wait_all_tasks_blocked()
        await outbox.aclose()

    assert given == [[0], [1], [2]]


async def test_an_iteration_that_is_cancelled_has_taken_nothing() -> None:
    outbox, inbox = memory_channel[int](10)
    async with outbox, inbox:
        handfuls = receive_chunks(inbox)

        async def take() -> None:
            await anext(handfuls)

        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(take)
                await anyio.wait_all_tasks_blocked()
                scope.cancel()
                outbox.send_nowait(1)

        assert await anext(handfuls) == [1]


class LostBehindTheSecond(MemoryReceiver[int]):
    """A channel of which one sender dies after the second record, and another one continues."""

    ended = False

    def receive_nowait(self) -> int:
        if self._queue.received == 2 and not self.ended:
            self.ended = True
            raise PeerLost("worker 0 died")
        return super().receive_nowait()


async def test_a_loss_is_raised_once_and_after_the_records_before_it() -> None:
    outbox, plain = memory_channel[int](10)
    async with plain, LostBehindTheSecond(plain._queue) as inbox:
        for number in range(4):
            outbox.send_nowait(number)
        await outbox.aclose()
        handfuls = receive_chunks(inbox)

        assert await anext(handfuls) == [0, 1]
        with pytest.raises(PeerLost, match="worker 0 died"):
            await anext(handfuls)
        assert [handful async for handful in handfuls] == [[2, 3]]


async def test_a_receiver_that_never_waits_lets_other_tasks_run() -> None:
    outbox, inbox = memory_channel[int](10 * MAX_CHUNK)
    turns: list[int] = []
    taken = 0

    async def other() -> None:
        while taken < 10 * MAX_CHUNK:
            turns.append(taken)
            await anyio.lowlevel.checkpoint()

    async with inbox, anyio.create_task_group() as tasks:
        tasks.start_soon(other)
        for number in range(10 * MAX_CHUNK):
            outbox.send_nowait(number)
        await outbox.aclose()
        async for handful in receive_chunks(inbox):
            taken += len(handful)

    assert len(turns) > 1
    assert max(after - before for before, after in pairwise(turns)) <= MAX_CHUNK


async def test_records_sent_at_once_to_a_fast_receiver_arrive_together() -> None:
    outbox, inbox = memory_channel[int](MAX_CHUNK)
    handfuls = 5
    given: list[int] = []

    async def take() -> None:
        given.extend([len(handful) async for handful in receive_chunks(inbox)])

    async with inbox, anyio.create_task_group() as tasks:
        tasks.start_soon(take)
        for _ in range(handfuls):
            await send_all(outbox, list(range(MAX_CHUNK)))
            await anyio.wait_all_tasks_blocked()
        await outbox.aclose()

    assert given == [MAX_CHUNK] * handfuls


async def test_a_handful_that_had_to_wait_for_room_arrives_whole() -> None:
    outbox, inbox = memory_channel[int](MAX_CHUNK)
    handfuls = 5
    given: list[int] = []

    async def give() -> None:
        async with outbox:
            for _ in range(handfuls):
                await send_all(outbox, list(range(MAX_CHUNK)))

    async with inbox, anyio.create_task_group() as tasks:
        tasks.start_soon(give)
        await anyio.wait_all_tasks_blocked()
        given.extend([len(handful) async for handful in receive_chunks(inbox)])

    assert given == [MAX_CHUNK] * handfuls


class Record:
    """Something that can be seen to die."""


async def test_what_was_sent_is_let_go_while_the_rest_waits_for_room() -> None:
    outbox, inbox = memory_channel[Record](1)
    records = [Record() for _ in range(3)]
    watched = [weakref.ref(record) for record in records]

    async with outbox, inbox, anyio.create_task_group() as tasks:
        tasks.start_soon(send_all, outbox, records)
        await anyio.wait_all_tasks_blocked()
        assert await inbox.receive() is watched[0]()
        assert [watch() is None for watch in watched] == [True, False, False]

        assert await inbox.receive() is watched[1]()
        assert await inbox.receive() is watched[2]()
    assert records == []
