from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.pipeline.flow_stages import Collect, Groups, Pack

from penstock import ReceiveChannel, SinkTrainer, TrainBatch, current, source
from penstock.errors import InvalidConfig, InvalidPipeline, RunInUse
from penstock.training import ResumePoint


class Foreign:
    def step(self, batch: TrainBatch, /) -> dict[str, float]:
        return {"sequences": len(batch)}


async def test_a_sink_that_keeps_no_checkpoints_cannot_be_gone_on_with(tmp_path: Path) -> None:
    with pytest.raises(InvalidPipeline, match="Collect: expected a sink that writes checkpoints"):
        await source(Groups(1)).sink(Collect()).run(folder=tmp_path)


async def test_a_trainer_that_cannot_resume_is_an_error_with_the_missing_methods(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"expected .* keep\(state\) and resume\(checkpoint\)"):
        await source(Groups(1)).then(Pack()).sink(SinkTrainer(Foreign())).run(folder=tmp_path)


async def test_two_folders_for_checkpoints_are_one_too_many(tmp_path: Path) -> None:
    class Kept(Foreign):
        steps = 0
        committed: ClassVar[dict[object, int]] = {}

        def save(self, folder: Path, committed: object, /) -> Path:
            raise NotImplementedError

    sink = SinkTrainer(Kept(), checkpoints=tmp_path / "elsewhere")

    with pytest.raises(ValueError, match="checkpoints: expected none in a run that is kept in a folder"):
        await source(Groups(1)).then(Pack()).sink(sink).run(folder=tmp_path)


async def test_a_folder_keeps_one_run_at_a_time(tmp_path: Path) -> None:
    class Keeping(Collect):
        def with_checkpoints(self, folder: Path, gathering: object) -> tuple[object, ResumePoint]:  # noqa: ARG002 (the hook's)
            return self, ResumePoint(0, {})

        async def run(self, inbox: ReceiveChannel[Any]) -> None:
            with pytest.raises(RunInUse, match="expected one run at a time") as raised:
                await source(Groups(1)).sink(Keeping()).run(folder=tmp_path)
            refused.append(raised.value)
            async for record in inbox:
                current().ledger.end(record, "trained")

    refused: list[RunInUse] = []

    await source(Groups(1)).sink(Keeping()).run(folder=tmp_path)

    assert len(refused) == 1
