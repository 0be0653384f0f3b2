"""A blocked trainer stops its sources within the bounds, and nothing is lost or too old when it continues."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field

import anyio
import anyio.to_thread
import numpy as np
from tests.failsafe import FAILSAFE_S
from tests.processes.worker_stages import SampleVersioned

from penstock import Batcher, Pipeline, SinkTrainer, TrainBatch, processes, source
from penstock.accounting import Ledger, PipelineStatistics
from penstock.testing import group

WORKERS = 2
CAPACITY = 4
CAPACITY_BYTES = 2**18
MAX_LAG = 3
GROUPS = 4
"""In a batch."""

TRAJECTORIES = len(group())


@dataclass
class Halting:
    """Stands still in its fifth step until it may go on."""

    halted: threading.Event = field(default_factory=threading.Event)
    may_go_on: threading.Event = field(default_factory=threading.Event)
    lags: list[int] = field(default_factory=list)
    """The highest of each batch."""

    def step(self, batch: TrainBatch) -> dict[str, float]:
        self.lags.append(int(np.max(len(self.lags) - batch.policy_versions)))
        if len(self.lags) == 5:
            self.halted.set()
            assert self.may_go_on.wait(FAILSAFE_S)
        return {}


STANDING_STILL = ["credit from Batcher", "credit from SinkTrainer", ""]
"""The `waiting_for` of each stage."""


async def standing_still(pipeline: Pipeline) -> PipelineStatistics:
    """Return the statistics when every stage waits for the trainer."""
    while True:
        statistics = pipeline.statistics()
        if [stage.waiting_for for stage in statistics.stages] == STANDING_STILL:
            return statistics
        await anyio.sleep(0.005)


async def test_a_trainer_that_stands_still_stops_its_sources_within_the_budget_of_records_and_bytes() -> None:
    trainer, ledger = Halting(), Ledger()
    flow = source(SampleVersioned(), on=processes(WORKERS), max_lag=MAX_LAG).then(
        Batcher(max_tokens=GROUPS * group().tokens.size),
        capacity=CAPACITY,
        capacity_bytes=CAPACITY_BYTES,
    )
    pipeline = flow.sink(SinkTrainer(trainer, max_steps=30), capacity=1)

    async def halt() -> tuple[PipelineStatistics, int]:
        await anyio.to_thread.run_sync(trainer.halted.wait)
        stopped = await standing_still(pipeline)
        in_flight = ledger.balance().in_flight
        trainer.may_go_on.set()
        return stopped, in_flight

    halting = asyncio.create_task(halt())
    await pipeline.run(ledger=ledger)
    stopped, in_flight = await halting

    channel = stopped.edges[0].channel
    assert channel.items == WORKERS * CAPACITY
    assert (channel.capacity, channel.capacity_bytes) == (WORKERS * CAPACITY, WORKERS * CAPACITY_BYTES)
    assert channel.nbytes <= WORKERS * CAPACITY_BYTES
    in_batches = 4 * GROUPS + 1  # one that is trained, one that waits, one that is sent, one that begins to fill
    assert in_flight <= TRAJECTORIES * (WORKERS * (CAPACITY + 1) + in_batches)
    assert len(trainer.lags) == 30
    assert max(trainer.lags) <= MAX_LAG
    assert ledger.balance().balanced
