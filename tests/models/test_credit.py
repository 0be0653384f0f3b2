"""Credit between two real ends of a channel: with releases in any order, no sender waits for ever."""

from __future__ import annotations

from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import anyio.to_thread
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.failsafe import FAILSAFE_S

from penstock import TrajectoryGroup
from penstock.channels import RemoteReceiver, RemoteSender, connect, serve
from penstock.errors import ChannelFull
from penstock.testing import group

AMPLE = 2**20
TIGHT = 16 * 1024
"""Bytes: two records of the larger kind."""

RECORDS = [group(completion_lengths=[length], instance_id=str(length)) for length in (3, 500)]


class Send(NamedTuple):
    large: bool
    together: int
    """The number of tasks that each send such a record."""


class Take(NamedTuple):
    records: int


class LetGo(NamedTuple):
    pick: int
    in_a_thread: bool


class Report(NamedTuple):
    """An end of a trajectory, which is also sent to a sender."""


class Look(NamedTuple):
    """Read the statistics, which requests withheld credit."""


STEPS = st.lists(
    st.builds(Send, st.booleans(), st.integers(1, 3))
    | st.builds(Send, st.booleans(), st.integers(1, 3))
    | st.builds(Take, st.integers(1, 6))
    | st.builds(LetGo, st.integers(0, 63), st.booleans())
    | st.builds(Report)
    | st.builds(Look),
    min_size=10,
    max_size=60,
)


class Ends:
    """Both ends of a channel, and the records that are held at the receiving one."""

    def __init__(self, outbox: RemoteSender[Any], inbox: RemoteReceiver[Any], capacity: int, *, ample: bool) -> None:
        self.outbox = outbox
        self.inbox = inbox
        self.capacity = capacity
        self.ample = ample
        self.held: list[TrajectoryGroup] = []
        self.on_their_way: list[str] = []

    async def play(self, step: Send | Take | LetGo | Report | Look) -> None:
        match step:
            case Send(large, together):
                await self.send(RECORDS[large], min(together, self.capacity) if self.ample else 1)
            case Take(records):
                await self.take(min(records, len(self.on_their_way)))
            case LetGo(pick, in_a_thread) if self.held:
                await self.let_go(pick, in_a_thread=in_a_thread)
            case Report():
                [peer] = self.inbox.peers
                peer.ended(RECORDS[0].id, 1, "trained", 1)
                await anyio.lowlevel.checkpoint()
            case Look():
                self.outbox.statistics()

    async def send(self, record: TrajectoryGroup, together: int) -> None:
        try:
            self.outbox.send_nowait(record)
        except ChannelFull:
            await self.send_after_waiting(record, together)
        else:
            self.on_their_way.append(record.instance_id)

    async def send_after_waiting(self, record: TrajectoryGroup, together: int) -> None:
        """Start sends that wait for credit; release as many records as they need, or all where bytes are scarce."""
        async with anyio.create_task_group() as tasks:
            for _ in range(together):
                tasks.start_soon(self.outbox.send, record)
            await anyio.lowlevel.checkpoint()
            await self.take(len(self.on_their_way))
            for _ in range(min(together, len(self.held)) if self.ample else len(self.held)):
                await self.let_go(0, in_a_thread=False)
            tasks.cancel_scope.deadline = anyio.current_time() + FAILSAFE_S
        assert not tasks.cancel_scope.cancelled_caught, f"{self.outbox} waits, {len(self.held)} are held"
        self.on_their_way += [record.instance_id] * together

    async def take(self, records: int) -> None:
        for _ in range(records):
            with anyio.fail_after(FAILSAFE_S):
                self.held.append(await self.inbox.receive())
            assert self.held[-1].instance_id == self.on_their_way.pop(0)

    async def let_go(self, pick: int, *, in_a_thread: bool) -> None:
        last = [self.held.pop(pick % len(self.held))]
        if in_a_thread:
            await anyio.to_thread.run_sync(last.clear)
        else:
            last.clear()
            await anyio.lowlevel.checkpoint()


async def _play(steps: list[Any], capacity: int, capacity_bytes: int) -> None:
    async with (
        serve("shm://", TrajectoryGroup, capacity=capacity, capacity_bytes=capacity_bytes) as inbox,
        connect(inbox.url, TrajectoryGroup) as outbox,
    ):
        assert isinstance(outbox, RemoteSender)
        ends = Ends(outbox, inbox, capacity, ample=capacity_bytes == AMPLE)
        for step in steps:
            await ends.play(step)
        await ends.take(len(ends.on_their_way))
        ends.held.clear()
        with anyio.fail_after(FAILSAFE_S):
            while outbox.statistics().items:
                await anyio.lowlevel.checkpoint()
        assert outbox.statistics().nbytes == 0


@settings(max_examples=40, phases=[Phase.generate])  # what two threads of ZeroMQ do is not the same every time
@given(steps=STEPS, capacity=st.sampled_from([1, 3, 8, 64]), capacity_bytes=st.sampled_from([AMPLE, TIGHT]))
def test_a_sender_that_waits_receives_released_credit(steps: list[Any], capacity: int, capacity_bytes: int) -> None:
    anyio.run(_play, steps, capacity, capacity_bytes)
