"""Run workers, and print for each the processors to which all its threads are bound, and what the pipeline says of it.

python -m tests.processes.script_of_numa WORKERS
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import anyio

from penstock import ReceiveChannel, SendChannel, TrajectoryGroup, current, processes, source
from penstock.testing import group

threading.Thread(target=threading.Event().wait, daemon=True).start()
"""A thread that began before its process was bound, as those of libraries do: a worker imports this script."""


def processors() -> str:
    """Return the processors to which all threads of this process are bound: `0,1`."""
    threads = [os.sched_getaffinity(int(thread.name)) for thread in Path("/proc/self/task").iterdir()]
    assert all(each == threads[0] for each in threads)
    return ",".join(map(str, sorted(threads[0])))


class Sample:
    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        await outbox.send(group(instance_id=f"processors of {current().worker.index}: {processors()}"))
        await anyio.sleep_forever()  # a worker that ends leaves its place to one that begins later


@dataclass(frozen=True)
class Print:
    """Prints one record of each worker."""

    workers: int

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        for _ in range(self.workers):
            each = await inbox.receive()
            sys.stdout.write(f"{each.ids[0].group.instance_id}\n")
            current().ledger.end(each, "trained")


async def main(workers: int) -> None:
    report = await source(Sample(), on=processes(workers)).sink(Print(workers)).run()
    for index, worker in enumerate(report.statistics.stages[0].workers):
        sys.stdout.write(f"state of {index}: {worker.numa}\n")


if __name__ == "__main__":
    anyio.run(main, int(sys.argv[1]))
