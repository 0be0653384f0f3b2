"""A script whose run never ends by itself; it prints the process id of its worker."""

from __future__ import annotations

import sys

import anyio
from tests.ray_real.stages import SampleForever

from penstock import ReceiveChannel, TrajectoryGroup, current, ray, source


class Sink:
    """Trains everything; after the first group, prints where the worker runs."""

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        first = True
        async for group in inbox:
            current().ledger.end(group, "trained")
            if first:
                (worker,) = pipeline.statistics().stages[0].workers
                sys.stdout.write(f"{worker.pid}\n")
                sys.stdout.flush()
                first = False


if __name__ == "__main__":
    pipeline = source(SampleForever(), on=ray(workers=1, num_cpus=0.5, address=sys.argv[1])).sink(Sink())
    anyio.run(pipeline.run)
