"""penstock: the shm and the tcp channel, through their public API."""

from __future__ import annotations

import anyio
import anyio.lowlevel

from penstock import TrajectoryGroup
from penstock.channels import connect, serve
from penstock.records import Packer

from ..records import Checker, batch_tokens
from .harness import DEADLINE_S, Case, Control, Latencies, Meter, Outcome, groups_to_send, producing

__all__ = ["penstock", "penstock_tcp", "produce"]


def penstock(case: Case) -> Outcome:
    """Send groups through `serve("shm://")`, received and packed one by one, as a `Batcher` does."""
    return anyio.run(_consume, case, "shm://")


def penstock_tcp(case: Case) -> Outcome:
    """Send groups over the loopback, each column as a frame."""
    return anyio.run(_consume, case, "tcp://127.0.0.1:0")


async def _consume(case: Case, url: str) -> Outcome:
    packer = Packer(batch_tokens(case.group, case.tokens))
    checker = Checker(producers=case.producers, group=case.group, tokens=case.tokens)
    control, latencies = Control(case.producers), Latencies()
    meter, received = Meter(case, checker, control, latencies), 0
    with anyio.fail_after(case.seconds + DEADLINE_S):
        async with serve(url, TrajectoryGroup, senders=case.producers) as inbox:
            with producing(produce, [(inbox.url, case, number, control) for number in range(case.producers)]):
                async for group in inbox:
                    if case.interval_s:
                        latencies.note(group.meta)
                    packer.add(group)
                    del group  # copied: its slots must not wait for the next one
                    received += 1
                    if case.interval_s:
                        control.take(received)
                    if packer.tokens + case.group * case.tokens > packer.max_tokens:
                        checker.check(packer.pack())
                    meter.look(received)
    if packer.groups:
        checker.check(packer.pack())
    checker.finish(control.sent)
    return meter.outcome()


def produce(url: str, case: Case, producer: int, control: Control) -> None:
    """Run a producer process."""
    anyio.run(_send, url, case, producer, control)


async def _send(url: str, case: Case, producer: int, control: Control) -> None:
    async with connect(url, TrajectoryGroup, name=f"producer {producer}") as outbox:
        for group in groups_to_send(case, producer, control):
            await outbox.send(group)
            if case.interval_s:  # it sleeps in the loop's thread until the next is due: the tick ends before
                await anyio.lowlevel.checkpoint()
