"""Hours of a pipeline whose workers are killed, stopped and restarted: no resource may grow, and no record get lost.

    python -m benchmarks.soak --minutes 60 --seed 0

    source (3 processes) → relay (2 processes) → sink

Every record is compared with the expected one, and none may arrive twice. Once a second the ledger must balance, and
the resources of this process are recorded: memory, descriptors, threads, mappings, children, sockets. Their maximum in
the last quarter of the time must not exceed that in the second. The faults and their times follow from the seed. Exits
with 1 after a failure.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import msgspec
import structlog
import zmq
from rich.console import Console

from penstock import Pipeline, ReceiveChannel, Report, SendChannel, TrajectoryGroup, current, processes, source
from penstock._pipeline.channels.zmq_context import zmq_context
from penstock.accounting import Ledger

from .contestants import leaving_nothing
from .records import make_groups
from .report import print_table, span, target, write_json

__all__ = ["Faults", "Once", "Sample", "grown", "main"]

GROUP, TOKENS = 8, 64

SOURCES, RELAYS = 3, 2

SEGMENT_BYTES = 2**20
"""Bytes that each worker may have in flight."""

RESTARTS = 10**9
"""Bound on restarts of a worker: more than any run has."""

FAULT_EVERY_S = 0.7
"""Mean time between two faults."""

STALLED_S = 2.0
"""Longest time for which a process is stopped."""

CLOSE_S = 2.0
"""Time for ZeroMQ's thread to close the sockets."""

MAX_GAP_S = 15.0
"""Longest time without a record: all workers may be down or stopped at once, but not for long."""


# -- the pipeline ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Make:
    """A source of groups named after their worker, at full speed."""

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        """Send numbered groups; see `Source`."""
        worker, number = current().worker, 0
        groups = make_groups(worker.index, group=GROUP, tokens=TOKENS)
        while True:
            name = f"{worker.index}.{worker.restart}.{number}"
            await outbox.send(msgspec.structs.replace(groups[number % len(groups)], instance_id=name))
            number += 1


@dataclass(frozen=True)
class Relay:
    """A stage that passes records on."""

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        """Pass records on; see `Stage`."""
        async for record in inbox:
            await outbox.send(record)


class Once:
    """Detects duplicate numbers. Keeps only those that are missing, so that its size stays bounded."""

    def __init__(self) -> None:
        self.highest = -1
        self.missing: set[int] = set()

    def take(self, number: int) -> bool:
        """Return whether `number` arrives for the first time."""
        if number > self.highest:
            self.missing.update(range(self.highest + 1, number))
            self.highest = number
            return True
        if number in self.missing:
            self.missing.remove(number)
            return True
        return False


@dataclass
class Check:
    """A sink that compares every record with the expected one, for a while."""

    seconds: float
    records: int = 0
    wrong: list[str] = field(default_factory=list)
    """Descriptions of failures."""
    longest_gap_s: float = 0.0

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        """Compare records until the time is over; see `Sink`."""
        expected = [
            [{name: column.tobytes() for name, column in group.columns().items()} for group in kinds]
            for kinds in (make_groups(index, group=GROUP, tokens=TOKENS) for index in range(SOURCES))
        ]
        once: dict[tuple[int, int], Once] = {}
        ledger, last = current().ledger, time.monotonic()
        with anyio.move_on_after(self.seconds):
            async for record in inbox:
                index, restart, number = map(int, record.instance_id.split("."))
                if (index, restart) not in once:
                    once.pop((index, restart - 2), None)  # ended long ago, and so did its records
                    once[index, restart] = Once()
                if not once[index, restart].take(number):
                    self.wrong.append(f"{record.instance_id} arrived twice")
                for name, column in expected[index][number % len(expected[index])].items():
                    if record.columns()[name].tobytes() != column:
                        self.wrong.append(f"{name} of {record.instance_id} differs")
                ledger.end(record, "trained")
                del record
                self.records += 1
                now = time.monotonic()
                self.longest_gap_s, last = max(self.longest_gap_s, now - last), now


# -- faults ----------------------------------------------------------------------------------------------


class Faults:
    """Injects faults into workers at random."""

    def __init__(self, pipeline: Pipeline, seed: int) -> None:
        self.injected: Counter[str] = Counter()
        self._pipeline = pipeline
        self._random = random.Random(seed)  # noqa: S311 (no secret)

    async def inject(self) -> None:
        """Inject faults until cancelled; continue stopped workers then."""
        async with anyio.create_task_group() as tasks:
            while True:
                await anyio.sleep(self._random.expovariate(1 / FAULT_EVERY_S))
                fault = self._random.choice(["SIGKILL", "SIGTERM", "stall"])
                share, stalled_s = self._random.random(), self._random.uniform(0, STALLED_S)
                workers = [worker for stage in self._pipeline.statistics().stages for worker in stage.workers]
                worker = workers[int(share * len(workers))]
                if worker.pid is not None and worker.state in {"starting", "running"}:
                    self.injected[fault] += 1
                    tasks.start_soon(self._inject_into, worker.pid, fault, stalled_s)

    async def _inject_into(self, pid: int, fault: str, stalled_s: float) -> None:
        with suppress(ProcessLookupError), _pidfd(pid) as pidfd:  # it may have ended by itself
            if fault != "stall":
                signal.pidfd_send_signal(pidfd, signal.Signals[fault])
                return
            signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
            try:
                await anyio.sleep(stalled_s)
            finally:
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)


@contextmanager
def _pidfd(pid: int) -> Iterator[int]:
    pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)


# -- resources -------------------------------------------------------------------------------------------------


class Sample(msgspec.Struct, frozen=True):
    """The resources of this process at one moment."""

    own_mb: float
    """Private memory."""
    shared_mb: float
    """Segments of the workers, those of dead workers included while they are read."""
    descriptors: int
    threads: int
    mappings: int
    children: int
    sockets: int
    """Directories of sockets, of all processes."""

    @classmethod
    def take(cls) -> Sample:
        """Return the current resources."""
        status = dict(line.split(":\t") for line in Path("/proc/self/status").read_text().splitlines())
        tasks = Path("/proc/self/task").iterdir()
        children = 0
        for task in tasks:
            with suppress(FileNotFoundError, ProcessLookupError):  # the thread ended meanwhile
                children += len((task / "children").read_text().split())
        return cls(
            own_mb=int(status["RssAnon"].split()[0]) / 1024,
            shared_mb=int(status["RssShmem"].split()[0]) / 1024,
            descriptors=len(os.listdir("/proc/self/fd")),  # noqa: PTH208 (one descriptor itself)
            threads=threading.active_count(),
            mappings=Path("/proc/self/maps").read_text().count("\n"),
            children=children,
            sockets=len(list(Path(os.environ["XDG_RUNTIME_DIR"]).glob("penstock-*"))),
        )


TOLERATED = Sample(own_mb=8, shared_mb=8, descriptors=50, threads=2, mappings=40, children=1, sockets=2)
"""Tolerated growth from the second quarter to the last: the resources of workers vary. A leak in every restart exceeds
it within minutes."""


def grown(samples: Sequence[Sample]) -> list[str]:
    """Return the resources that grew from the second quarter of the time to the last. Needs at least four samples."""
    quarter = len(samples) // 4
    if not quarter:
        return []
    before, after = samples[quarter : 2 * quarter], samples[-quarter:]
    found = []
    for name in Sample.__struct_fields__:
        first, last = (max(getattr(sample, name) for sample in part) for part in (before, after))
        if last > first + getattr(TOLERATED, name):
            found.append(f"{name} grew from {first:.0f} to {last:.0f}")
    return found


@dataclass
class Watch:
    """Records resources, and checks the ledger, once a second."""

    ledger: Ledger
    samples: list[Sample] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    async def record(self) -> None:
        """Record until cancelled."""
        while True:
            await anyio.sleep(1)
            self.samples.append(Sample.take())
            balance = self.ledger.balance()
            if not balance.balanced or balance.in_flight < 0:
                self.wrong.append(f"the ledger did not balance: {balance}")


# -- all of it -------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """The results of a soak."""

    check: Check
    faults: Faults
    watch: Watch
    report: Report
    before: Sample
    after: Sample
    """Resources after the run."""

    @property
    def wrong(self) -> list[str]:
        """Return descriptions of failures."""
        balance, wrong = self.report.balance, [*self.check.wrong, *self.watch.wrong, *grown(self.watch.samples)]
        if balance.in_flight or not balance.balanced or balance.ended["trained"] != GROUP * self.check.records:
            wrong.append(f"the ledger does not balance at the end: {balance.admitted} admitted, {balance.ended}")
        if not self.check.records:
            wrong.append("no record arrived")
        if self.check.longest_gap_s > MAX_GAP_S:
            wrong.append(f"for {self.check.longest_gap_s:.1f} s no record arrived")
        left = [name for name in Sample.__struct_fields__ if getattr(self.after, name) > getattr(self.before, name)]
        wrong += [f"{name} left behind" for name in left if name in {"descriptors", "children", "sockets"}]
        return wrong


async def soak(seconds: float, seed: int) -> Outcome:
    """Run the pipeline, and inject faults."""
    zmq_context().socket(zmq.PAIR).close()  # the one ZeroMQ context of this process stays
    before = Sample.take()
    check, ledger = Check(seconds), Ledger()
    pipeline = (
        source(Make(), on=processes(SOURCES, restarts=RESTARTS))
        .then(Relay(), on=processes(RELAYS, restarts=RESTARTS), capacity_bytes=SEGMENT_BYTES)
        .sink(check, capacity_bytes=SEGMENT_BYTES)
    )
    faults, watch = Faults(pipeline, seed), Watch(ledger)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(faults.inject)
        tasks.start_soon(watch.record)
        await pipeline.run(ledger=ledger)
        tasks.cancel_scope.cancel()
    gc.collect()
    await anyio.sleep(CLOSE_S)
    assert pipeline.report is not None  # noqa: S101 (it has run)
    return Outcome(check, faults, watch, pipeline.report, before, Sample.take())


def show(outcome: Outcome, console: Console) -> None:
    """Print the results."""
    samples, balance = outcome.watch.samples, outcome.report.balance
    quarter = len(samples) // 4
    parts = [[outcome.before], samples[quarter : 2 * quarter], samples[-quarter:], [outcome.after]]
    rows = [
        [name, *(f"{max((getattr(sample, name) for sample in part), default=0):.0f}" for part in parts)]
        for name in Sample.__struct_fields__
    ]
    print_table(console, "most held by this process", ("", "before", "2nd quarter", "last quarter", "after"), rows)
    ended = [[state, f"{count:,}"] for state, count in balance.ended.items() if count]
    print_table(console, f"{balance.admitted:,} trajectories admitted", ("ended", ""), ended)
    injected = [[fault, f"{count:,}"] for fault, count in sorted(outcome.faults.injected.items())]
    restarts = sum(worker.restarts for stage in outcome.report.statistics.stages for worker in stage.workers)
    print_table(console, f"{restarts:,} restarts", ("fault", ""), injected)
    console.print(f"longest time without a record {outcome.check.longest_gap_s:.2f} s", highlight=False)
    for wrong in outcome.wrong[:20]:
        console.print(f"WRONG: {wrong}", style="bold red", highlight=False, markup=False)


@leaving_nothing()
def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--minutes", type=span, default=60.0, help="duration")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults")
    parser.add_argument("--json", type=target, help="write the results here")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))  # deaths are expected
    with tempfile.TemporaryDirectory(prefix="soak-") as sockets:
        os.environ["XDG_RUNTIME_DIR"] = sockets
        outcome = anyio.run(soak, 60 * arguments.minutes, arguments.seed)
    show(outcome, Console())
    content = {
        "seed": arguments.seed,
        "seconds": outcome.report.seconds,
        "samples": msgspec.to_builtins(outcome.watch.samples),
        "balance": msgspec.to_builtins(outcome.report.balance),
        "faults": dict(outcome.faults.injected),
        "wrong": outcome.wrong,
    }
    write_json(arguments.json, content)
    sys.exit(bool(outcome.wrong))


if __name__ == "__main__":
    main()
