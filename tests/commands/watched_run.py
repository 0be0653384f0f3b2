"""A run in a folder that another process watches.

    python -m tests.commands.watched_run FOLDER STEPS

It prints `trained N` when `STEPS` steps are done, and then waits in its next step until it is killed. With 0 steps it
trains 12 and ends.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
from tests.words import Words

from penstock import (
    AdvantageNormalizer,
    Batcher,
    SendChannel,
    SinkTrainer,
    StageInfo,
    TrainBatch,
    TrajectoryGroup,
    source,
)
from penstock.testing import group
from penstock.trackers import Samples
from penstock.training import ResumePoint, write_checkpoint

LAST = 12

CHECKPOINT_EVERY = 4


@dataclass(frozen=True)
class Prompts:
    """Sends a group of three trajectories for each step."""

    first: int = 0

    def resume_from(self, point: ResumePoint) -> Prompts:
        return replace(self, first=point.step)

    def stage_info(self) -> StageInfo:
        return StageInfo(tokenizers=(Words(),))

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        for number in range(self.first, LAST + 1):
            await outbox.send(
                group(
                    instance_id=str(number), completion_lengths=[1, 2, 3], prompt_length=1, rewards=[0.0, 1.0, number]
                )
            )


class Trainer:
    """Trains nothing; keeps its number of steps in checkpoints."""

    def __init__(self, wait_after: int) -> None:
        self.steps = 0
        self.committed: Mapping[Any, int] = {}
        self._wait_after = wait_after

    def step(self, batch: TrainBatch) -> dict[str, float]:
        if self.steps and self.steps == self._wait_after:
            print(f"trained {self.steps}", flush=True)  # noqa: T201 (for the test)
            threading.Event().wait()
        self.steps += 1
        return {"loss": 1 / self.steps, "accuracy": len(batch) / 4}

    def keep(self, state: Mapping[str, Any]) -> None:
        """Keep nothing: no stage has state."""

    def save(self, folder: Path, _: Any) -> Path:
        def write(path: Path) -> None:
            (path / "steps.json").write_text(json.dumps(self.steps))

        return write_checkpoint(folder, self.steps, write)

    def resume(self, checkpoint: Path) -> None:
        self.steps = json.loads((checkpoint / "steps.json").read_text())


async def main(folder: Path, wait_after: int) -> None:
    sink = SinkTrainer(Trainer(wait_after), max_steps=LAST, checkpoint_every=CHECKPOINT_EVERY, samples=Samples(every=2))
    await (
        source(Prompts())
        .then(AdvantageNormalizer("grpo"))
        .then(Batcher(max_tokens=64, sequences=3))
        .sink(sink)
        .run(folder=folder, config={"lr": 0.5, "model": {"name": "none"}})
    )


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), int(sys.argv[2]))
