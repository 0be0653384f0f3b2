"""Members that join a pipeline by messages of their own: honest ones, and such as send what they like."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
from tests.failsafe import FAILSAFE_S

from penstock import TrajectoryGroup
from penstock._pipeline.workers.worker_messages import (
    Assigned,
    Connected,
    Finished,
    Joined,
    Joins,
    Wants,
    WorkerEvent,
    WorkerReport,
    decode_instruction,
)
from penstock.channels import ChannelKey, RemoteSender, connect
from penstock.testing import group

DIGEST = "the same script"

ENV = "Rollouts"

GROUP_SIZE = 2


def numbered(number: int) -> TrajectoryGroup:
    """Return what a worker samples of a prompt."""
    return group(env=ENV, instance_id=str(number), completion_lengths=[3] * GROUP_SIZE)


class Member:
    """A worker that has connected, and does what a test tells it."""

    def __init__(self, sender: RemoteSender[TrajectoryGroup]) -> None:
        self.sender = sender
        self.instructions: asyncio.Queue[Any] = asyncio.Queue()
        sender.on_instruction(lambda payload: self.instructions.put_nowait(decode_instruction(payload)))

    def report(self, event: WorkerEvent) -> None:
        self.send(msgspec.msgpack.encode(WorkerReport.of(event)))

    def send(self, payload: bytes) -> None:
        """Send any bytes as a report."""
        self.sender.send_telemetry(payload)

    async def instruction(self) -> Any:
        with anyio.fail_after(FAILSAFE_S):
            return await self.instructions.get()

    async def join(self) -> Joined:
        """Take a place, and begin."""
        self.report(Joins(DIGEST))
        joined = await self.instruction()
        assert isinstance(joined, Joined)
        self.report(Connected("tcp", 1, "", ""))
        return joined

    async def prompt(self) -> int | None:
        """Return the number of a prompt; None where no more come."""
        self.report(Wants())
        instruction = await self.instruction()
        if not isinstance(instruction, Assigned):
            return None
        ((prompt, _),) = instruction.prompts
        return int(prompt.instance_id)

    async def sample(self) -> int | None:
        """Sample a prompt and send the group; return its number."""
        if (number := await self.prompt()) is not None:
            await self.sender.send(numbered(number))
        return number

    async def sample_all(self) -> list[int]:
        """Sample until no prompt is left, and finish."""
        sampled = []
        while (number := await self.sample()) is not None:
            sampled.append(number)
        self.report(Finished())
        return sampled

    async def disconnected(self) -> None:
        with anyio.fail_after(FAILSAFE_S):
            await self.sender.wait_failed()


@asynccontextmanager
async def member(url: str, key: ChannelKey | None = None, name: str = "member") -> AsyncIterator[Member]:
    """Connect with the key of the pipeline; by default that of this user."""
    async with connect(url, TrajectoryGroup, name=name, key=key) as sender:
        assert isinstance(sender, RemoteSender)
        yield Member(sender)
