"""penstock: the shm channel, through its public API."""

from __future__ import annotations

import anyio
import anyio.lowlevel

from penstock import TrajectoryGroup, connect, serve
from penstock.schemas import Packer

from ..records import Checker, batch_tokens
from .harness import DEADLINE_S, Case, Control, Latencies, Meter, Outcome, groups_to_send, producing

__all__ = ["penstock", "produce"]


def penstock(case: Case) -> Outcome:
    """Groups through `serve("shm://")`, packed by penstock's own `Packer`."""
    return anyio.run(_consume, case)


async def _consume(case: Case) -> Outcome:
    packer = Packer(batch_tokens(case.group, case.tokens))
    checker = Checker(producers=case.producers, group=case.group, tokens=case.tokens)
    control, latencies = Control(case.producers), Latencies()
    meter = Meter(case, checker, control, latencies)
    received = 0
    with anyio.fail_after(case.seconds + DEADLINE_S):
        async with serve("shm://", TrajectoryGroup, senders=case.producers) as inbox:
            with producing(produce, [(inbox.url, case, number, control) for number in range(case.producers)]):
                async for group in inbox:
                    if case.interval_s:
                        latencies.note(group.meta)
                    if not packer.fits(group):
                        checker.check(packer.pack())
                        meter.look(received)
                    packer.add(group)
                    del group  # copied: its slots must not wait until the next one comes
                    received += 1
                    if case.interval_s:
                        control.take(received)
                        meter.look(received)
    checker.check(packer.pack())
    checker.finish(control.sent)
    return meter.outcome()


def produce(url: str, case: Case, producer: int, control: Control) -> None:
    """What a producer's process runs."""
    anyio.run(_send, url, case, producer, control)


async def _send(url: str, case: Case, producer: int, control: Control) -> None:
    async with connect(url, TrajectoryGroup) as outbox:
        for group in groups_to_send(case, producer, control):
            await outbox.send(group)
            if case.interval_s:  # it sleeps in the loop's thread until the next is due: the tick ends before
                await anyio.lowlevel.checkpoint()
