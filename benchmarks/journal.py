"""Cost of the journal: a pipeline with and without it, in turn; trajectories a second, as a ratio.

    python -m benchmarks.journal

    source (2 processes) → (Journal →) Batcher → Count

Sources send prebuilt groups. The sink only counts, and announces a checkpoint after every so many batches, so that the
journal's files are deleted as in a run. Beside it the speed of the disk: one file written in the same way as the
journal's, without a pipeline, as an upper bound.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import anyio
from rich.console import Console

from penstock import Batcher, Flow, Journal, Pipeline, TrajectoryGroup, processes, source
from penstock._pipeline.durability.journal_entry import encode_entry
from penstock.accounting import Ledger

from .contestants import leaving_nothing
from .contestants.harness import DEADLINE_S
from .end_to_end import GROUP, TOKENS, WARM_UP_S, Count, Prebuilt
from .machine import cpu_seconds
from .records import BATCH_TOKENS, make_groups
from .report import command_line, count, median_of, print_table, write_json

__all__ = ["main"]

CHECKPOINT_EVERY = 16
"""Batches of 64 Ki tokens, 17 MB of journal: files that are deleted this soon need not reach the disk."""

CAPACITY_BYTES = 2**31


def checkpoint_now_and_then(ledger: Ledger) -> None:
    """Announce a checkpoint after every so many batches."""
    if not ledger.step % CHECKPOINT_EVERY:
        ledger.announce_checkpoint(ledger.committed)


@dataclass(frozen=True)
class Result:
    """The result of one run."""

    trajectories_per_s: float
    cores: float
    """Cores used by this process."""


@dataclass(frozen=True)
class Way:
    """The use of a journal."""

    name: str
    journal: bool
    fsync: bool = False

    def pipeline(self, begun: Flow[TrajectoryGroup], sink: Count, folder: Path) -> Pipeline:
        """Return the pipeline behind the source."""
        if self.journal:
            begun = begun.then(Journal(folder, capacity_bytes=CAPACITY_BYTES, fsync=self.fsync))
        return begun.then(Batcher(max_tokens=BATCH_TOKENS)).sink(sink)


WAYS = (Way("without", journal=False), Way("with", journal=True), Way("with fsync", journal=True, fsync=True))


async def run(way: Way, workers: int, seconds: float, folder: Path) -> Result:
    """Run the pipeline once, and measure it for `seconds` after a warm-up."""
    train = Count(checkpoint_now_and_then)
    begun = source(Prebuilt(seconds + 2 * WARM_UP_S), on=processes(workers))
    pipeline = way.pipeline(begun, train, folder)
    looks: list[tuple[float, int, float]] = []
    with anyio.fail_after(seconds + DEADLINE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pipeline.run)
            await train.started.wait()
            await anyio.sleep(WARM_UP_S)
            looks.append((time.monotonic(), train.trajectories, cpu_seconds([os.getpid()])))
            await anyio.sleep(seconds)
            looks.append((time.monotonic(), train.trajectories, cpu_seconds([os.getpid()])))
    balance = pipeline.report.balance if pipeline.report else None
    if balance is None or balance.ended["trained"] != balance.admitted:
        raise AssertionError(f"expected every trajectory that was sent to be trained, got {balance}")
    took, trained, cpu = (last - first for first, last in zip(*looks, strict=True))
    return Result(trained / took, cpu / took)


def disk(seconds: float, folder: Path) -> float:
    """Return trajectories a second into one file: the same bytes, written 16 groups at a time and deleted likewise."""
    entries = encode_entry(make_groups(0, group=GROUP, tokens=TOKENS, advantages=False)[0]) * 16
    groups, began, path = 0, time.monotonic(), folder / "bare"
    while time.monotonic() - began < seconds:
        with path.open("wb", buffering=0) as file:
            for _ in range(CHECKPOINT_EVERY // 2):
                file.write(entries)
                groups += 16
        path.unlink()
    return groups * GROUP / (time.monotonic() - began)


def show(results: dict[str, list[Result]], bare: list[float], console: Console) -> None:
    """Print the results."""
    without = [result.trajectories_per_s for result in results["without"]]
    rows = []
    for name, ran in results.items():
        rates = [result.trajectories_per_s for result in ran]
        ratios = [rate / other for rate, other in zip(rates, without, strict=True)]
        rows.append([name, median_of(rates), median_of(ratios, 2), f"{statistics.median(r.cores for r in ran):.2f}"])
    rows.append(["one file, bare", median_of(bare), "", ""])
    print_table(console, f"groups of {GROUP} × {TOKENS} tokens", ("journal", "trajectories/s", "ratio", "cores"), rows)


@leaving_nothing()
def main() -> None:
    """Parse the command line and run."""
    parser = command_line(__doc__, seconds=2.0, repeats=5)
    parser.add_argument("--workers", type=count, default=2, help="processes that the source runs in")
    parser.add_argument("--folder", type=Path, help="folder of the journal; by default that of temporary files")
    arguments = parser.parse_args()
    results: dict[str, list[Result]] = {way.name: [] for way in WAYS}
    bare: list[float] = []
    for _ in range(arguments.repeats):
        for way in WAYS:
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                results[way.name].append(anyio.run(run, way, arguments.workers, arguments.seconds, Path(folder)))
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            bare.append(disk(arguments.seconds / 2, Path(folder)))
    show(results, bare, Console())
    rates = {name: [vars(result) for result in ran] for name, ran in results.items()}
    write_json(arguments.json, {"rows": rates, "bare": bare})


if __name__ == "__main__":
    main()
