from __future__ import annotations

import anyio
import pytest

from penstock import GroupId, TrainBatch, TrajectoryGroup
from penstock._pipeline.accounting.repetition_sets import masks_by_group
from penstock._pipeline.graph.edge import CountingSendChannel, EdgeCounter, StoppableReceiveChannel
from penstock.accounting import Ledger
from penstock.channels import memory_channel
from penstock.errors import ChannelFull
from penstock.testing import group


def test_the_trajectories_of_a_batch_are_those_of_its_groups() -> None:
    first, second = group(instance_id="a"), group(instance_id="b", completion_lengths=[1, 2, 3])

    held = list(masks_by_group(TrainBatch.pack([first, second])))

    assert held == [(GroupId("test", "a"), 0b11), (GroupId("test", "b"), 0b111)]
    assert list(masks_by_group(first)) == held[:1]


async def test_behind_a_source_records_are_admitted_and_counted() -> None:
    ledger = Ledger()
    counter = EdgeCounter(ledger)
    sender, receiver = memory_channel[object](8)

    async with CountingSendChannel(sender, counter) as outbox, receiver:
        await outbox.send(group(instance_id="a"))
        outbox.send_nowait(TrainBatch.pack([group(instance_id="b")]))
        await outbox.send("neither")

    assert ledger.in_flight == counter.trajectories == 4


async def test_a_record_that_a_source_sends_twice_is_sent_once() -> None:
    ledger = Ledger()
    counter = EdgeCounter(ledger)
    sender, receiver = memory_channel[TrajectoryGroup](8)

    async with CountingSendChannel(sender, counter) as outbox, receiver:
        await outbox.send(group(rollout_ids=[0, 1]))
        outbox.send_nowait(group(rollout_ids=[1, 0]))
        await outbox.send(group(rollout_ids=[1, 2]))
        await outbox.send(group(rollout_ids=[1, 2]))

        received = [receiver.receive_nowait().rollout_ids.tolist() for _ in range(2)]
        assert receiver.statistics().items == 0

    assert received == [[0, 1], [2]]
    assert ledger.in_flight == counter.trajectories == 3
    assert ledger.balance().reasons["rejected"] == {"in flight already": 5}


async def test_a_source_may_send_a_record_again_whose_sending_failed() -> None:
    ledger, record = Ledger(), group(instance_id="a")
    sender, receiver = memory_channel[TrajectoryGroup](1)

    async with CountingSendChannel(sender, EdgeCounter(ledger)) as outbox, receiver:
        await outbox.send(group(instance_id="before"))
        with pytest.raises(ChannelFull):
            outbox.send_nowait(record)
        with anyio.move_on_after(0):
            await outbox.send(record)
        receiver.receive_nowait()
        await outbox.send(record)

        assert receiver.receive_nowait() is record

    assert ledger.balance().admitted == ledger.in_flight == 4


async def test_a_refused_send_is_not_counted() -> None:
    counter = EdgeCounter()
    sender, receiver = memory_channel[object](1)

    async with CountingSendChannel(sender, counter) as outbox, receiver:
        outbox.send_nowait(group())
        with pytest.raises(ChannelFull):
            outbox.send_nowait(group())

    assert counter.trajectories == 2


async def test_closing_all_closes_the_clones_too() -> None:
    sender, receiver = memory_channel[object](1)
    outbox = CountingSendChannel(sender, EdgeCounter())
    outbox.clone()

    async with receiver:
        await outbox.close_all()
        await outbox.aclose()

        with pytest.raises(anyio.EndOfStream):
            await receiver.receive()


async def test_how_long_a_closed_clone_waited_is_remembered() -> None:
    sender, receiver = memory_channel[object](1)

    async with CountingSendChannel(sender, EdgeCounter()) as outbox, receiver:
        async with outbox.clone() as clone, anyio.create_task_group() as tasks:
            await clone.send(1)
            tasks.start_soon(clone.send, 2)
            await anyio.wait_all_tasks_blocked()
            assert outbox.waits[0]
            await receiver.receive()

        waits, waited_s = outbox.waits

    assert not waits
    assert waited_s > 0


async def test_other_tasks_run_while_a_sink_receives_records_that_are_there() -> None:
    outbox, end = memory_channel[int](100)
    received: list[int] = []
    received_before: list[int] = []

    async def other() -> None:
        received_before.append(len(received))

    async with StoppableReceiveChannel(end) as inbox, anyio.create_task_group() as tasks:
        async with outbox:
            for number in range(100):
                outbox.send_nowait(number)
        tasks.start_soon(other)
        async for record in inbox:
            received.append(record)  # noqa: PERF401 (looked at meanwhile)

    assert received == list(range(100))
    assert received_before[0] < 100
