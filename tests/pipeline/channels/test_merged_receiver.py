from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

import anyio
import pytest
from tests.failsafe import FAILSAFE_S

from penstock import TrajectoryGroup
from penstock._pipeline.channels.merged_receiver import MergedReceiver
from penstock.channels import ChannelKey, RemoteReceiver, RemoteSender, connect, serve
from penstock.errors import PeerClosed
from penstock.testing import group

KEY = ChannelKey(bytes(range(32)))


class Ends(NamedTuple):
    inbox: MergedReceiver[TrajectoryGroup]
    here: RemoteSender[TrajectoryGroup]
    elsewhere: RemoteSender[TrajectoryGroup]
    receivers: list[RemoteReceiver[TrajectoryGroup]]


@asynccontextmanager
async def merged() -> AsyncIterator[Ends]:
    """Yield the ends of a channel over shared memory and of one over tcp, with a sender each."""
    async with AsyncExitStack() as stack:
        shm = await stack.enter_async_context(serve("shm://", TrajectoryGroup, capacity=4))
        tcp = await stack.enter_async_context(serve("tcp://127.0.0.1:0", TrajectoryGroup, capacity=4, key=KEY))
        inbox = MergedReceiver([shm, tcp])
        here = await stack.enter_async_context(connect(shm.url, TrajectoryGroup, name="here"))
        elsewhere = await stack.enter_async_context(connect(tcp.url, TrajectoryGroup, name="elsewhere", key=KEY))
        with anyio.fail_after(FAILSAFE_S):
            yield Ends(inbox, here, elsewhere, [shm, tcp])


async def test_records_of_all_channels_arrive_in_the_order_of_each() -> None:
    received: list[str] = []
    async with merged() as ends, anyio.create_task_group() as tasks:

        async def send(sender: RemoteSender[TrajectoryGroup], name: str) -> None:
            async with sender:
                for number in range(20):
                    await sender.send(group(instance_id=f"{name} {number}"))

        tasks.start_soon(send, ends.here, "here")
        tasks.start_soon(send, ends.elsewhere, "elsewhere")
        received += [each.instance_id async for each in ends.inbox]

    for name in ("here", "elsewhere"):
        assert [each for each in received if each.startswith(name)] == [f"{name} {number}" for number in range(20)]
    assert len(received) == 40


async def test_a_channel_that_is_always_ready_does_not_starve_the_other() -> None:
    async with merged() as ends:
        for number in range(3):
            await ends.here.send(group(instance_id=f"here {number}"))
            await ends.elsewhere.send(group(instance_id=f"elsewhere {number}"))
        while sum(receiver.statistics().items for receiver in ends.receivers) < 6:
            await anyio.lowlevel.checkpoint()

        received = [ends.inbox.receive_nowait().instance_id.partition(" ")[0] for _ in range(6)]

    assert received in (["here", "elsewhere"] * 3, ["elsewhere", "here"] * 3)


async def test_a_waiting_task_is_woken_by_either_channel() -> None:
    async with merged() as ends, anyio.create_task_group() as tasks:
        for sender in (ends.here, ends.elsewhere):
            tasks.start_soon(sender.send, group(instance_id=sender.statistics().transport))

            received = await ends.inbox.receive()

            assert received.instance_id == sender.statistics().transport


async def test_the_stream_ends_when_every_channel_has_ended() -> None:
    async with merged() as ends:
        await ends.here.aclose()
        with pytest.raises(anyio.WouldBlock):
            ends.inbox.receive_nowait()
        await ends.elsewhere.aclose()

        with pytest.raises(anyio.EndOfStream):
            await ends.inbox.receive()


async def test_one_sender_can_be_dismissed_and_the_others_stay() -> None:
    async with merged() as ends:
        (elsewhere,) = (peer for peer in ends.inbox.peers if peer.name == "elsewhere")
        await elsewhere.dismiss()
        await ends.elsewhere.wait_failed()

        with pytest.raises(PeerClosed):
            await ends.elsewhere.send(group())
        await ends.here.send(group(instance_id="still here"))
        assert (await ends.inbox.receive()).instance_id == "still here"


async def test_statistics_are_added_up() -> None:
    async with merged() as ends:
        await ends.here.send(group())
        await ends.elsewhere.send(group())
        await ends.inbox.receive()

        statistics = ends.inbox.statistics()

    assert (statistics.transport, statistics.senders, statistics.received) == ("shm and tcp", 2, 1)
