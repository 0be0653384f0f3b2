"""A pipeline script as a user writes one; the tests run it, interrupt it, and kill it.

Its stages live in `__main__`. It prints the process ids of its workers when both work.
"""

# ruff: noqa: T201 (the tests listen to what it prints)

from __future__ import annotations

import sys
from dataclasses import dataclass

import anyio

from penstock import ReceiveChannel, SendChannel, TrajectoryGroup, processes, source
from penstock.testing import group

print("imported", flush=True)


@dataclass(frozen=True)
class Sample:
    forever: bool

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        number = 0
        while self.forever or not number:
            await outbox.send(group(instance_id=str(number)))
            number += 1


@dataclass(frozen=True)
class Tell:
    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        told = False
        async for _ in inbox:
            pids = [worker.pid for worker in pipeline.statistics().stages[0].workers]
            if not told and all(pids):  # the second may still be on its way
                told = True
                print("workers", *pids, flush=True)


pipeline = source(Sample(forever="forever" in sys.argv), on=processes(2)).sink(Tell())

if __name__ == "__main__" or "unguarded" in sys.argv:
    try:
        anyio.run(pipeline.run)
    finally:
        print("ended", pipeline.report.ended_by if pipeline.report else "", flush=True)
