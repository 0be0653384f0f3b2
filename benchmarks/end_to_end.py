"""A whole pipeline with real stages and a sink that only counts: trajectories a second, and time by stage.

    python -m benchmarks.end_to_end

    source (2 processes) → RewardBridge → AdvantageNormalizer → Batcher → Count

Sources send prebuilt groups, because sampling is not measured. For each stage it reports the share of time that it
waited, and for what (`statistics()`); and because the stages share one event loop, the time of a group in each alone.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import msgspec
from rich.console import Console

from penstock import (
    AdvantageNormalizer,
    Batcher,
    Pipeline,
    ReceiveChannel,
    RewardBridge,
    SendChannel,
    Stage,
    TrainBatch,
    TrajectoryGroup,
    current,
    processes,
    source,
)
from penstock.accounting import Ledger, PipelineStatistics
from penstock.channels import memory_channel
from penstock.testing import drive

from .contestants import leaving_nothing
from .contestants.harness import DEADLINE_S
from .machine import cpu_seconds
from .records import BATCH_TOKENS, make_groups
from .report import command_line, count, median_of, print_table, write_json

__all__ = ["main"]

GROUP, TOKENS = 8, 1024

EDGE_CAPACITY = 16
"""Groups that may wait between two stages: as many as a stage receives at once."""

WARM_UP_S = 1.0

ALONE_GROUPS = 400
"""Groups with which a stage is timed alone."""

ALONE_REPEATS = 7
"""Number of timings; the minimum counts, because the machine is shared."""

REWARDS: dict[str, Any] = {"length_bounty": {"reward": -0.0001, "cap": 0.5}, "clip": [-10, 10]}


@dataclass(frozen=True)
class Prebuilt:
    """A source of groups without advantages, at full speed, for a while."""

    seconds: float

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        """Send prebuilt groups; see `Source`."""
        groups = make_groups(current().worker.index, group=GROUP, tokens=TOKENS, advantages=False)
        number, end = 0, time.monotonic() + self.seconds
        while time.monotonic() < end:
            await outbox.send(msgspec.structs.replace(groups[number % len(groups)], instance_id=str(number)))
            number += 1


@dataclass(slots=True)
class Count:
    """A sink that only counts, and commits each batch."""

    then: Callable[[Ledger], object] | None = None
    """Called after every batch."""
    trajectories: int = 0
    started: anyio.Event = field(default_factory=anyio.Event)

    async def run(self, inbox: ReceiveChannel[TrainBatch]) -> None:
        """Count and commit; see `Sink`."""
        ledger = current().ledger
        async for batch in inbox:
            ledger.commit(batch, ledger.step + 1)
            if self.then is not None:
                self.then(ledger)
            self.trajectories += len(batch)
            self.started.set()
            del batch


@dataclass(frozen=True)
class Result:
    """The result of one run."""

    trajectories_per_s: float
    records_share: dict[str, float]
    """Share of the time that each stage waited for records."""
    credit_share: dict[str, float]
    """Share of the time that each stage waited for credit of the next channel."""
    cores: dict[str, float]
    """Cores used by the workers, and by this process."""


def middle_stages() -> list[Stage[Any, Any]]:
    """Return the stages between source and sink."""
    return [RewardBridge.from_config(REWARDS), AdvantageNormalizer("grpo"), Batcher(max_tokens=BATCH_TOKENS)]


async def run(workers: int, seconds: float) -> Result:
    """Run the pipeline once, and measure it for `seconds` after a warm-up."""
    rewards, normalizer, batcher = middle_stages()
    count = Count()
    placed = source(Prebuilt(seconds + 2 * WARM_UP_S), on=processes(workers))
    between_groups = placed.then(rewards).then(normalizer, capacity=EDGE_CAPACITY).then(batcher, capacity=EDGE_CAPACITY)
    pipeline: Pipeline = between_groups.sink(count)
    looks: list[Look] = []
    with anyio.fail_after(seconds + DEADLINE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pipeline.run)
            await count.started.wait()
            await anyio.sleep(WARM_UP_S)
            looks.append(_look(pipeline, count))
            await anyio.sleep(seconds)
            looks.append(_look(pipeline, count))
    balance = pipeline.report.balance if pipeline.report else None
    if balance is None or balance.ended["trained"] != balance.admitted:
        raise AssertionError(f"expected every trajectory that was sent to be counted, got {balance}")
    return _between(*looks)


@dataclass(frozen=True)
class Look:
    """The state of the pipeline at one moment."""

    at: float
    trajectories: int
    statistics: PipelineStatistics
    cpu: dict[str, float]


def _look(pipeline: Pipeline, count: Count) -> Look:
    seen = pipeline.statistics()
    pids = [worker.pid for stage in seen.stages for worker in stage.workers if worker.pid is not None]
    cpu = {"workers": cpu_seconds(pids), "this process": cpu_seconds([os.getpid()])}
    return Look(time.monotonic(), count.trajectories, seen, cpu)


def _between(first: Look, last: Look) -> Result:
    took = last.at - first.at
    pairs = list(zip(first.statistics.stages, last.statistics.stages, strict=True))
    return Result(
        (last.trajectories - first.trajectories) / took,
        {b.name: (b.waited_for_records_s - a.waited_for_records_s) / took for a, b in pairs},
        {b.name: (b.waited_for_credit_s - a.waited_for_credit_s) / took for a, b in pairs},
        {name: (last.cpu[name] - first.cpu[name]) / took for name in first.cpu},
    )


async def alone() -> dict[str, float]:
    """Return microseconds of processor time of a group in each stage alone, the edge behind it included."""
    built = make_groups(0, group=GROUP, tokens=TOKENS, advantages=False)
    records: list[Any] = [
        msgspec.structs.replace(built[number % len(built)], instance_id=str(number)) for number in range(ALONE_GROUPS)
    ]
    costs = {}
    for stage in middle_stages():
        seconds = [await _timed(stage, records) for _ in range(ALONE_REPEATS)]
        costs[type(stage).__name__] = min(seconds) / ALONE_GROUPS * 1e6
        records = list(await drive(stage, records))
    return costs


async def _timed(stage: Stage[Any, Any], records: Sequence[Any]) -> float:
    """Return seconds of processor time that `stage` takes for `records`.

    Sent records are freed at once, as in a pipeline, so that their memory is reused. Otherwise the time would contain
    page faults of new memory.
    """
    feed, inbox = memory_channel[Any](len(records))
    outbox, sent = memory_channel[Any](EDGE_CAPACITY)
    for record in records:
        feed.send_nowait(record)
    feed.close()

    async def run() -> None:
        async with outbox:
            await stage.run(inbox, outbox)

    async with inbox, sent:
        gc.collect()  # garbage of earlier stages must not count
        began = time.process_time()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            async for record in sent:
                del record
        return time.process_time() - began


def show(results: list[Result], costs: dict[str, float], console: Console) -> None:
    """Print the results."""
    rates = median_of([result.trajectories_per_s for result in results])
    cores = ", ".join(
        f"{name} {statistics.median(result.cores[name] for result in results):.2f}" for name in results[0].cores
    )
    console.print(f"{rates} trajectories/s end to end; cores: {cores}", highlight=False)
    rows = [
        [
            name,
            f"{100 * statistics.median(result.records_share[name] for result in results):.0f}",
            f"{100 * statistics.median(result.credit_share[name] for result in results):.0f}",
            f"{costs[name]:.0f}" if name in costs else "",
        ]
        for name in results[0].records_share
    ]
    print_table(console, "time by stage", ("stage", "% for records", "% for credit", "alone, µs/group"), rows)


@leaving_nothing()
def main() -> None:
    """Parse the command line and run."""
    parser = command_line(__doc__, seconds=3.0, repeats=3)
    parser.add_argument("--workers", type=count, default=2, help="processes that the source runs in")
    arguments = parser.parse_args()
    results = [anyio.run(run, arguments.workers, arguments.seconds) for _ in range(arguments.repeats)]
    costs = anyio.run(alone)
    show(results, costs, Console())
    content = {"rows": [msgspec.to_builtins(vars(result)) for result in results], "alone_us_per_group": costs}
    write_json(arguments.json, content)


if __name__ == "__main__":
    main()
