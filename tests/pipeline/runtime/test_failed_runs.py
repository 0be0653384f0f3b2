"""A run that a failure ends keeps the steps that it has trained."""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio
import pytest
from tests.failsafe import FAILSAFE_S
from tests.loop_clock import LoopClock
from tests.pipeline.flow_stages import Pack

from penstock import ReceiveChannel, SendChannel, StageInfo, TrainBatch, TrajectoryGroup, current, source
from penstock.errors import StageFailed
from penstock.testing import group


@dataclass(frozen=True)
class FailAfterSteps:
    """Sends groups, and raises when `steps` optimizer steps are done."""

    steps: int

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        for number in range(self.steps):
            await outbox.send(group(instance_id=str(number)))
        await current().ledger.reached(self.steps)
        raise ValueError("no more")


@dataclass(frozen=True)
class Save:
    """Trains, and saves at the end of its stream, unless it `hangs` there."""

    hangs: bool = False
    stream_ended: anyio.Event = field(default_factory=anyio.Event)
    saved: list[int] = field(default_factory=list)

    def stage_info(self) -> StageInfo:
        return StageInfo(saves_at_end=True)

    async def run(self, inbox: ReceiveChannel[TrainBatch]) -> None:
        ledger = current().ledger
        async for batch in inbox:
            ledger.commit(batch, ledger.step + 1)
        self.stream_ended.set()
        if self.hangs:
            await anyio.sleep_forever()
        self.saved.append(ledger.step)


async def test_a_stage_that_raises_ends_the_run_after_the_steps_were_saved() -> None:
    sink = Save()
    pipeline = source(FailAfterSteps(3)).then(Pack()).sink(sink)

    with pytest.raises(StageFailed, match="FailAfterSteps raised ValueError: no more"):
        await pipeline.run()

    assert sink.saved == [3]
    assert pipeline.report is not None
    assert pipeline.report.stop_reason == "FailAfterSteps raised ValueError: no more"


async def test_a_run_without_a_step_has_nothing_to_save() -> None:
    sink = Save()

    with pytest.raises(StageFailed, match="no more"):
        await source(FailAfterSteps(0)).then(Pack()).sink(sink).run()

    assert sink.saved == []


async def test_a_sink_that_cannot_save_does_not_keep_a_failed_run() -> None:
    clock, sink = LoopClock(), Save(hangs=True)

    async def later() -> None:
        await sink.stream_ended.wait()
        clock.set_forward(601)

    with anyio.fail_after(2 * 601 + FAILSAFE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(later)
            with pytest.raises(StageFailed, match="no more"):
                await source(FailAfterSteps(1)).then(Pack()).sink(sink).run()

    assert sink.saved == []
