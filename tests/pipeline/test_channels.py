from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

import anyio
import pytest

from penstock import ReceiveChannel, SendChannel, TrajectoryGroup, connect, memory_channel, serve
from penstock.testing import CHANNEL_RULES, MakeChannel


@dataclass
class MemoryEnds:
    inbox: ReceiveChannel[TrajectoryGroup]
    waiting: list[SendChannel[TrajectoryGroup]] = field(default_factory=list)

    @asynccontextmanager
    async def join(self) -> AsyncIterator[SendChannel[TrajectoryGroup]]:
        async with self.waiting.pop(0) as outbox:
            yield outbox


@dataclass
class RemoteEnds:
    inbox: ReceiveChannel[TrajectoryGroup]
    url: str

    def join(self) -> AbstractAsyncContextManager[SendChannel[TrajectoryGroup]]:
        return connect(self.url, TrajectoryGroup)


@asynccontextmanager
async def memory(*, capacity: int = 8, capacity_bytes: int = 2**20, senders: int = 1) -> AsyncIterator[MemoryEnds]:
    outbox, inbox = memory_channel[TrajectoryGroup](capacity, capacity_bytes)
    async with outbox, inbox:
        ends = MemoryEnds(inbox, [outbox.clone() for _ in range(senders)])
        await outbox.aclose()
        yield ends


def remote(url: str) -> MakeChannel:
    @asynccontextmanager
    async def make(*, capacity: int = 8, capacity_bytes: int = 2**20, senders: int = 1) -> AsyncIterator[RemoteEnds]:
        async with serve(
            url, TrajectoryGroup, capacity=capacity, capacity_bytes=capacity_bytes, senders=senders
        ) as inbox:
            yield RemoteEnds(inbox, inbox.url)

    return make


CARRIERS: dict[str, MakeChannel] = {"memory": memory, "shm": remote("shm://"), "tcp": remote("tcp://127.0.0.1:0")}


@pytest.mark.parametrize("rule", CHANNEL_RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("carrier", CARRIERS)
async def test_every_carrier_keeps_every_rule(carrier: str, rule: Callable[[MakeChannel], Awaitable[None]]) -> None:
    with anyio.fail_after(20):
        await rule(CARRIERS[carrier])
