"""Small stages that the tests of pipelines are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import msgspec

from penstock import ReceiveChannel, SendChannel, StageInfo, TrainBatch, TrajectoryGroup, current, drop
from penstock.testing import group


@dataclass(frozen=True)
class Count:
    """Sends the numbers up to `limit`."""

    limit: int

    async def run(self, outbox: SendChannel[int]) -> None:
        for number in range(self.limit):
            await outbox.send(number)


@dataclass(frozen=True)
class Forever:
    """Sends one number again and again."""

    async def run(self, outbox: SendChannel[int]) -> None:
        while True:
            await outbox.send(0)


@dataclass(frozen=True)
class Double:
    """Sends what it receives, doubled."""

    async def run(self, inbox: ReceiveChannel[int], outbox: SendChannel[int]) -> None:
        async for number in inbox:
            await outbox.send(2 * number)


@dataclass(frozen=True)
class Collect:
    """Keeps what it receives; returns after `enough` records."""

    received: list[object] = field(default_factory=list)
    enough: int | None = None

    async def run(self, inbox: ReceiveChannel[object]) -> None:
        async for record in inbox:
            self.received.append(record)
            if len(self.received) == self.enough:
                return


@dataclass(frozen=True)
class Groups:
    """Sends groups of two trajectories and never speaks to the ledger."""

    count: int
    lengths: Sequence[int] = (4, 6)
    tokenizer: Any = None

    def stage_info(self) -> StageInfo:
        return StageInfo(tokenizers=None if self.tokenizer is None else (self.tokenizer,))

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        for number in range(self.count):
            await outbox.send(group(instance_id=str(number), completion_lengths=self.lengths))


@dataclass(frozen=True)
class DropOdd:
    """Drops every second group with `drop`."""

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        async for record in inbox:
            if int(record.instance_id) % 2:
                drop(record, "filtered", "odd")
            else:
                await outbox.send(record)


@dataclass(frozen=True)
class SwallowOdd:
    """Forgets every second group without `drop`."""

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        async for record in inbox:
            if int(record.instance_id) % 2 == 0:
                await outbox.send(record)


@dataclass(frozen=True)
class ForgetAwait:
    """Sends everything, and awaits nothing."""

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        async for record in inbox:
            outbox.send(record)  # type: ignore[unused-coroutine]


@dataclass(frozen=True)
class DropAll:
    """Drops every group with `drop`."""

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:  # noqa: ARG002 (the protocol's)
        async for record in inbox:
            drop(record, "filtered", "all")


@dataclass(frozen=True)
class DropEverything:
    """A sink that looks at groups, and drops them."""

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        async for record in inbox:
            drop(record, "filtered", "looked at")


@dataclass(frozen=True)
class WaitAtEnd:
    """Sends a group, closes its end, and waits to be cancelled."""

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        await outbox.send(group(instance_id="0"))
        await outbox.aclose()
        await anyio.sleep_forever()


@dataclass(frozen=True)
class PutList:
    """Puts a list where an array has to be."""

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        async for record in inbox:
            await outbox.send(msgspec.structs.replace(record, rewards=record.rewards.tolist()))


@dataclass(frozen=True)
class Pack:
    """A batch of every group."""

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrainBatch]) -> None:
        async for record in inbox:
            await outbox.send(TrainBatch.pack([record]))


@dataclass(frozen=True)
class Train:
    """Commits every batch, `steps` of them at most."""

    steps: int | None = None

    async def run(self, inbox: ReceiveChannel[TrainBatch]) -> None:
        step = 0
        async for batch in inbox:
            step += 1
            current().ledger.commit(batch, step)
            if step == self.steps:
                return
