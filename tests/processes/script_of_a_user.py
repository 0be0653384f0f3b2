"""A pipeline script as a user writes one; the tests run it, interrupt it, and kill it.

Its stages live in `__main__`. It prints the process ids of its workers when both work.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import anyio

from penstock import ReceiveChannel, SendChannel, TrajectoryGroup, current, processes, source
from penstock.testing import group


def report(*words: object) -> None:
    """Write a line at once: workers write to the same pipe, and `print` may write word by word."""
    os.write(sys.stdout.fileno(), f"{' '.join(map(str, words))}\n".encode())


report("imported")


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
        reported = False
        async for record in inbox:
            current().ledger.end(record, "trained")
            pids = [worker.pid for worker in pipeline.statistics().stages[0].workers]
            if not reported and all(pids):  # the second may still be on its way
                reported = True
                report("workers", *pids)


pipeline = source(Sample(forever="forever" in sys.argv), on=processes(2)).sink(Tell())

if __name__ == "__main__" or "unguarded" in sys.argv:
    try:
        anyio.run(pipeline.run)
    finally:
        report("ended", pipeline.report.stop_reason if pipeline.report else "")
