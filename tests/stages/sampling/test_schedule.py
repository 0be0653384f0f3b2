"""A pipeline has one bound on lag, and what its stages state of a step; its source and its Batcher obey both."""

from __future__ import annotations

from functools import partial

import anyio
import pytest
from anyio.lowlevel import checkpoint
from tests.stages.sampling.failing_environments import all_different

from penstock import (
    AdvantageNormalizer,
    Batcher,
    ReceiveChannel,
    SendChannel,
    SinkTrainer,
    SourceEnv,
    StageInfo,
    TrainBatch,
    TrajectoryGroup,
    drop,
    source,
)
from penstock.accounting import Ledger
from penstock.policies import NoOpPolicy
from penstock.testing import VirtualClock

GROUPS, GROUP_SIZE = 4, 2


class DropsEveryFifth:
    """Drops groups behind a stage that has gathered them."""

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        async for group in inbox:
            await outbox.send(group) if int(group.instance_id) % 5 else drop(group, "filtered", "every fifth")


class Trains:
    """Notes what it trains."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def step(self, batch: TrainBatch) -> dict[str, float]:
        self.batches.append([int(group.instance_id) for group in batch.groups])
        return {}


@pytest.mark.parametrize("gathered", [1, GROUPS])
def test_a_synchronous_run_goes_on_where_a_stage_drops_some_of_what_another_gathers(gathered: int) -> None:
    trainer = Trains()
    env = SourceEnv(all_different, NoOpPolicy(), group_size=GROUP_SIZE)
    pipeline = (
        source(env, max_lag=0)
        .then(AdvantageNormalizer("batch", batch_groups=gathered))
        .then(DropsEveryFifth())
        .then(Batcher(max_tokens=999, sequences=GROUPS * GROUP_SIZE))
        .sink(SinkTrainer(trainer, max_steps=3))
    )

    VirtualClock().run(pipeline.run)

    assert trainer.batches == [[1, 2, 3, 4], [6, 7, 8, 9], [11, 12, 13, 14]]


class TakesAhead:
    """A sink that takes all that comes, and never trains."""

    def stage_info(self) -> StageInfo:
        return StageInfo(waits_for=GROUPS * GROUP_SIZE, commits=True)

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        async for group in inbox:
            del group


def test_a_sink_that_takes_records_ahead_of_its_steps_is_not_taken_for_one_that_waits() -> None:
    ledger = Ledger()
    pipeline = source(SourceEnv(all_different, NoOpPolicy(), group_size=GROUP_SIZE), max_lag=1).sink(TakesAhead())

    async def run() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(pipeline.run, ledger=ledger))
            while ledger.in_flight < 2 * GROUPS * GROUP_SIZE:
                await checkpoint()
            await anyio.sleep(1000)
            tasks.cancel_scope.cancel()

    VirtualClock().run(run)

    assert ledger.balance().admitted == 2 * GROUPS * GROUP_SIZE
