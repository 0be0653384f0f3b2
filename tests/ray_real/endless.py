"""A script whose run never ends by itself: it prints the process id of its worker, and the alarm set at its end."""

from __future__ import annotations

import signal
import sys

import anyio
from tests.ray_real.stages import SampleForever

from penstock import ReceiveChannel, TrajectoryGroup, current, ray, source


class Sink:
    """Trains everything; after the first group, prints where the worker runs; at the end, the seconds until SIGALRM."""

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        first = True
        try:
            async for group in inbox:
                current().ledger.end(group, "trained")
                if first:
                    (worker,) = pipeline.statistics().stages[0].workers
                    tell(worker.pid)
                    first = False
        finally:
            tell(signal.getitimer(signal.ITIMER_REAL)[0])


def tell(number: float | None) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    pipeline = source(SampleForever(), on=ray(workers=1, num_cpus=0.5, address=sys.argv[1])).sink(Sink())
    anyio.run(pipeline.run)
