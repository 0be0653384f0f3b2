"""A sink that stops for a while: its sources must stop, memory must not grow, and the speed must recover.

    python -m benchmarks.halt --seconds 30

source (3 processes) → relay (2 processes) → sink

The sink counts for ten seconds, stops, and counts for ten seconds again. From a second after it has stopped, no
trajectory may be begun, and the resources of this process may not grow. Exits with 1 after a failure.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field

import anyio
from rich.console import Console

from penstock import Pipeline, ReceiveChannel, TrajectoryGroup, processes, source
from penstock.accounting import Ledger

from .contestants import leaving_nothing
from .report import print_table, span
from .soak import RELAYS, SEGMENT_BYTES, SOURCES, TOLERATED, Make, Relay, Sample

__all__ = ["main"]

WARMING_S, COUNTING_S = 3.0, 10.0

SETTLING_S = 1.0

SLOWER = 0.8
"""Minimum share of the speed before; the speed of the machine varies about as much."""


@dataclass
class Halting:
    """A sink that counts, stops, and counts again."""

    seconds: float
    ledger: Ledger
    pipeline: Pipeline = field(init=False)
    before: float = 0.0
    """Records a second before the halt."""
    after: float = 0.0
    waits: list[str] = field(default_factory=list)
    """The reason for which each stage waited at the end of the halt."""
    wrong: list[str] = field(default_factory=list)

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        """Count, stop, count, and compare; see `Sink`."""
        await self._count(inbox, WARMING_S)
        self.before = await self._count(inbox, COUNTING_S)
        await anyio.sleep(SETTLING_S)
        held, admitted = Sample.take(), self.ledger.balance().admitted
        await anyio.sleep(self.seconds)
        self._compare(held, Sample.take(), self.ledger.balance().admitted - admitted)
        self.waits = [f"{stage.name}: {stage.waiting_for or 'busy'}" for stage in self.pipeline.statistics().stages]
        self.after = await self._count(inbox, COUNTING_S)
        if self.after < SLOWER * self.before:
            self.wrong.append(f"{self.after:.0f} records/s afterwards, {self.before:.0f} before")

    async def _count(self, inbox: ReceiveChannel[TrajectoryGroup], seconds: float) -> float:
        """Receive for so long; return records a second."""
        began, records = time.monotonic(), 0
        while time.monotonic() - began < seconds:
            self.ledger.end(await inbox.receive(), "trained")
            records += 1
        return records / (time.monotonic() - began)

    def _compare(self, before: Sample, after: Sample, begun: int) -> None:
        if begun:
            self.wrong.append(f"{begun} trajectories were begun during the halt")
        for name in Sample.__struct_fields__:
            more = getattr(after, name) - getattr(before, name)
            if more > getattr(TOLERATED, name):
                self.wrong.append(f"{name} grew by {more:.0f} during the halt")


async def halt(seconds: float) -> Halting:
    """Run the pipeline."""
    ledger = Ledger()
    sink = Halting(seconds, ledger)
    sink.pipeline = (
        source(Make(), on=processes(SOURCES))
        .then(Relay(), on=processes(RELAYS), capacity_bytes=SEGMENT_BYTES)
        .sink(sink, capacity_bytes=SEGMENT_BYTES)
    )
    report = await sink.pipeline.run(ledger=ledger)
    if not report.balance.balanced:
        sink.wrong.append(f"the ledger does not balance: {report.balance}")
    return sink


@leaving_nothing()
def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seconds", type=span, default=30.0, help="duration of the halt")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="halt-") as sockets:
        os.environ["XDG_RUNTIME_DIR"] = sockets
        outcome = anyio.run(halt, arguments.seconds)
    console = Console()
    rows = [["before", f"{outcome.before:,.0f}"], ["after", f"{outcome.after:,.0f}"]]
    print_table(console, f"records/s, around {arguments.seconds:.0f} s of halt", ("", ""), rows)
    for wait in outcome.waits:
        console.print(wait, highlight=False, markup=False)
    for wrong in outcome.wrong:
        console.print(f"WRONG: {wrong}", style="bold red", highlight=False, markup=False)
    sys.exit(bool(outcome.wrong))


if __name__ == "__main__":
    main()
