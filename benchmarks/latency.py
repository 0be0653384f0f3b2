"""Latency of a group: alone, under paced load, and to a receiver beside a trainer that holds the GIL.

    python -m benchmarks.latency

One way, from before `send` in the producer's process to the receipt of the group; producers send when a group is due,
not when there is credit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import msgspec
from rich.console import Console

from penstock import (
    Batcher,
    ReceiveChannel,
    SendChannel,
    SinkTrainer,
    TrainBatch,
    TrajectoryGroup,
    processes,
    source,
)

from .contestants import CONTESTANTS, Absent, Case, Outcome, leaving_nothing
from .contestants.harness import WARM_UP_S, Latencies
from .records import make_groups
from .report import command_line, median_of, print_table, write_json

__all__ = ["main"]

OURS = "penstock"

ALONE = (OURS, "iceoryx2-event", "iceoryx2-spin")

LOADS = (10_000, 38_000, 100_000, 189_000)
"""Trajectories a second."""

TOKENS = 1024

BATCH = 64
"""Trajectories in a step of the busy trainer; the next batch arrives after as many milliseconds."""

STEP_S = 0.055
"""Time of a step of the busy trainer; less than the time to fill a batch, because channels must not be full."""


@contextmanager
def busy_thread() -> Iterator[None]:
    """Run Python code in a second thread of this process within the body."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            sum(number * number for number in range(1000))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@dataclass(frozen=True)
class Pings:
    """A source of one time-stamped trajectory a millisecond."""

    seconds: float

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        """Send stamped trajectories; see `Source`."""
        groups = make_groups(0, group=1, tokens=TOKENS)
        for number in range(int(self.seconds / 0.001)):
            await anyio.sleep(0.001)
            stamped = groups[0].meta | {"sent_ns": time.monotonic_ns()}
            await outbox.send(msgspec.structs.replace(groups[0], instance_id=str(number), meta=stamped))


@dataclass(frozen=True)
class Clock:
    """A stage that records the latency of each group."""

    latencies: Latencies = field(default_factory=Latencies)

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        """Record latencies and pass groups on; see `Stage`."""
        begin: float | None = None
        async for group in inbox:
            self.latencies.note(group.meta)
            if begin is None:
                begin = time.monotonic()
            elif time.monotonic() - begin < WARM_UP_S:
                self.latencies.restart()
            await outbox.send(group)


class BusyTrainer:
    """A trainer whose step runs Python code all the time."""

    def step(self, batch: TrainBatch) -> dict[str, float]:
        """Hold the interpreter for a while."""
        end, steps = time.perf_counter() + STEP_S, 0
        while time.perf_counter() < end:
            steps += 1
        return {"tokens": float(len(batch.tokens))}


def beside_sink_trainer(case: Case) -> Outcome:
    """Measure one in flight, in a pipeline with a `SinkTrainer` whose trainer is busy nearly all the time."""
    clock = Clock()
    pipeline = (
        source(Pings(case.seconds + WARM_UP_S), on=processes(1))
        .then(clock, capacity=64, capacity_bytes=2**24)
        .then(Batcher(max_tokens=BATCH * TOKENS))
        .sink(SinkTrainer(BusyTrainer()))
    )
    anyio.run(pipeline.run)
    return Outcome(float("nan"), *clock.latencies.percentiles())


def beside_thread(case: Case) -> Outcome:
    """Measure one in flight, over a channel, beside a thread that holds the GIL for the switch interval of 5 ms."""
    with busy_thread():
        return CONTESTANTS["penstock"](case.pinging())


class Table:
    """The results of each measurement over the repeats."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._outcomes: dict[str, list[Outcome]] = {}
        self._skipped: dict[str, str] = {}

    def add(self, name: str, outcome: Outcome) -> None:
        """Add a measurement."""
        self._outcomes.setdefault(name, []).append(outcome)

    def skip(self, name: str, reason: str) -> None:
        """Add a measurement that cannot be made here, or failed."""
        self._skipped[name] = reason

    def print(self, console: Console) -> None:
        """Print the table."""
        rows = [
            [name, median_of([o.p50_us for o in outcomes]), median_of([o.p99_us for o in outcomes])]
            for name, outcomes in self._outcomes.items()
        ]
        print_table(console, self.title, ("", "p50 µs", "p99 µs"), rows)
        for name, reason in self._skipped.items():
            console.print(f"{name} {reason}", style="dim", highlight=False, markup=False)

    def rows(self) -> list[dict[str, Any]]:
        """Return the results for JSON."""
        return [
            {
                "what": name,
                "p50_us": [round(o.p50_us, 1) for o in outcomes],
                "p99_us": [round(o.p99_us, 1) for o in outcomes],
                "trajectories_per_s": [round(o.trajectories_per_s) for o in outcomes if o.trajectories_per_s > 0],
            }
            for name, outcomes in self._outcomes.items()
        ]


def measure(seconds: float, repeats: int) -> list[Table]:
    """Run every measurement in turn."""
    alone = Table("one trajectory in flight")
    paced = Table("paced load: 4 producers, groups of 8")
    busy = Table("one in flight, beside a trainer that runs Python")
    single, loaded = Case(1, 1, TOKENS, seconds), Case(4, 8, TOKENS, seconds)
    for _ in range(repeats):
        for name in ALONE:
            try:
                alone.add(name, CONTESTANTS[name](single.pinging()))
            except Absent as absent:
                alone.skip(name, f"skipped: {absent}")
            except Exception as error:
                if name == OURS:
                    raise
                alone.skip(name, f"failed: {type(error).__name__}: {error}")
        for load in LOADS:
            paced.add(f"{load:,}/s", CONTESTANTS["penstock"](loaded.paced(load)))
        busy.add("SinkTrainer", beside_sink_trainer(single))
        busy.add("bare channel", beside_thread(single))
    return [alone, paced, busy]


@leaving_nothing()
def main() -> None:
    """Parse the command line and run."""
    parser = command_line(__doc__, seconds=2.0, repeats=3)
    arguments = parser.parse_args()
    tables, console = measure(arguments.seconds, arguments.repeats), Console()
    for table in tables:
        table.print(console)
    write_json(arguments.json, {table.title: table.rows() for table in tables})


if __name__ == "__main__":
    main()
