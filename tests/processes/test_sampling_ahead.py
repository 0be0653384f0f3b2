"""A source with `max_lag` begins no more before the first step than the stated batch allows, wherever it samples."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field

import anyio
import pytest
from tests.failsafe import FAILSAFE_S
from tests.stages.sampling.failing_environments import all_different

from penstock import Batcher, SinkTrainer, SourceEnv, TrainBatch, here, processes, source
from penstock.accounting import Ledger
from penstock.policies import NoOpPolicy

BATCH, MAX_LAG = 16, 2
ALLOWED = (MAX_LAG + 1) * BATCH


@dataclass
class WaitsInItsFirstStep:
    """Ends its first step when it may."""

    may_go_on: threading.Event = field(default_factory=threading.Event)
    steps: int = 0

    def step(self, batch: TrainBatch) -> dict[str, float]:  # noqa: ARG002 (the protocol's)
        assert self.may_go_on.wait(FAILSAFE_S)
        self.steps += 1
        return {}


@pytest.mark.parametrize("workers", [0, 1])  # of several, one may begin ten seconds after another
async def test_what_is_sampled_before_the_first_step_is_bounded_by_the_batch_that_is_stated(workers: int) -> None:
    trainer, ledger = WaitsInItsFirstStep(), Ledger()
    env = SourceEnv(all_different, NoOpPolicy(), group_size=4)
    on = processes(workers) if workers else here()
    flow = source(env, on=on, max_lag=MAX_LAG).then(Batcher(max_tokens=10_000, sequences=BATCH))

    async def begun() -> int:
        while True:
            if (admitted := ledger.balance().admitted) >= ALLOWED:
                trainer.may_go_on.set()
                return admitted
            await anyio.sleep(0.005)

    counting = asyncio.create_task(begun())
    await flow.sink(SinkTrainer(trainer, max_steps=MAX_LAG + 1)).run(ledger=ledger)

    assert await counting == ALLOWED
    assert trainer.steps == MAX_LAG + 1
    assert ledger.balance().ended["stale"] == 0
