"""penstock: the shm and the tcp channel, through their public API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TypeAlias

import anyio
import anyio.lowlevel

from penstock import TrainBatch, TrajectoryGroup
from penstock.channels import RemoteReceiver, connect, serve
from penstock.records import Packer

from ..records import Checker, batch_tokens
from .harness import DEADLINE_S, Case, Control, Latencies, Meter, Outcome, groups_to_send, producing

__all__ = ["penstock", "penstock_tcp", "produce"]

Inbox: TypeAlias = RemoteReceiver[TrajectoryGroup]

Progress: TypeAlias = tuple[TrainBatch | None, int]
"""A batch if one is full, and the groups received so far."""


def penstock(case: Case) -> Outcome:
    """Send groups through `serve("shm://")`, packed by penstock's own `Packer`."""
    return anyio.run(_consume, case, "shm://")


def penstock_tcp(case: Case) -> Outcome:
    """Send groups over the loopback, each column as a frame."""
    return anyio.run(_consume, case, "tcp://127.0.0.1:0")


async def _consume(case: Case, url: str) -> Outcome:
    packer = Packer(batch_tokens(case.group, case.tokens))
    checker = Checker(producers=case.producers, group=case.group, tokens=case.tokens)
    control, latencies = Control(case.producers), Latencies()
    meter = Meter(case, checker, control, latencies)
    consume = _one_by_one if case.interval_s else _packed
    with anyio.fail_after(case.seconds + DEADLINE_S):
        async with serve(url, TrajectoryGroup, senders=case.producers) as inbox:
            with producing(produce, [(inbox.url, case, number, control) for number in range(case.producers)]):
                async for batch, received in consume(inbox, packer, control, latencies):
                    if batch is not None:
                        checker.check(batch)
                    meter.look(received)
    checker.finish(control.sent)
    return meter.outcome()


async def _packed(inbox: Inbox, packer: Packer, _control: Control, _latencies: Latencies) -> AsyncIterator[Progress]:
    """Yield batch after batch, at full speed."""
    received = 0
    with suppress(anyio.EndOfStream):
        while True:
            batch = await inbox.receive_packed(packer)
            received += len(batch.groups)
            yield batch, received


async def _one_by_one(inbox: Inbox, packer: Packer, control: Control, latencies: Latencies) -> AsyncIterator[Progress]:
    """Receive group after group, and record the latency of each."""
    received = 0
    async for group in inbox:
        latencies.note(group.meta)
        batch = None if packer.fits(group) else packer.pack()
        packer.add(group)
        del group  # copied: its slots must not wait for the next one
        received += 1
        control.take(received)
        yield batch, received
    yield packer.pack(), received


def produce(url: str, case: Case, producer: int, control: Control) -> None:
    """Run a producer process."""
    anyio.run(_send, url, case, producer, control)


async def _send(url: str, case: Case, producer: int, control: Control) -> None:
    async with connect(url, TrajectoryGroup, name=f"producer {producer}") as outbox:
        for group in groups_to_send(case, producer, control):
            await outbox.send(group)
            if case.interval_s:  # it sleeps in the loop's thread until the next is due: the tick ends before
                await anyio.lowlevel.checkpoint()
