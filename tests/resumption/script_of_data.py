"""A run over two epochs of a data set, sampled by two worker processes, whose trainer kills itself in a given step.

    python -m tests.resumption.script_of_data FOLDER STEP

The newest checkpoint in FOLDER lists what was trained: the number of each prompt, its row and its reward.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
from tests.fake_policy import FakePolicy, Letters

from penstock import (
    AdvantageNormalizer,
    Batcher,
    GroupId,
    RewardBridge,
    SinkTrainer,
    SourceEnv,
    TrainBatch,
    processes,
    source,
)
from penstock.accounting import CommittedPrompts
from penstock.data import PromptDataset
from penstock.rewards import RewardFunction, RewardInput
from penstock.training import write_checkpoint

ROWS = [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(60)]
EPOCHS = 2
GROUP_SIZE = 2
STEP_GROUPS = 4
NEVER = 0


class Recorder:
    """A trainer whose weights are the list of what it trained."""

    def __init__(self, killed_in_step: int) -> None:
        self._killed_in_step = killed_in_step
        self.trained: list[Any] = []
        self.committed: Mapping[GroupId, int] = {}
        self.steps = 0

    def step(self, batch: TrainBatch) -> dict[str, float]:
        self.steps += 1
        if self.steps == self._killed_in_step:
            os.kill(os.getpid(), signal.SIGKILL)
        rewards = batch.rewards[::GROUP_SIZE].tolist()
        for group, reward in zip(batch.groups, rewards, strict=True):
            self.trained.append([group.meta["task"], group.meta["row"], reward])
        return {}

    def save(self, folder: Path, committed: CommittedPrompts) -> Path:
        kept = {"steps": self.steps, "trained": self.trained, "committed": committed.state_dict()}
        return write_checkpoint(folder, self.steps, lambda into: _write(into / "kept.json", json.dumps(kept)))

    def keep(self, state: Mapping[str, Any]) -> None:
        """Keep nothing else."""

    def resume(self, checkpoint: Path) -> None:
        kept = json.loads((checkpoint / "kept.json").read_text())
        self.steps, self.trained = kept["steps"], kept["trained"]
        self.committed = CommittedPrompts.of_state(kept["committed"])


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def answered(completion: RewardInput) -> float:
    return float(completion.meta["row"]["answer"])


async def run(folder: Path, killed_in_step: int) -> None:
    """Run as a user's script does, and resume when it is started again."""
    prompts = SourceEnv(
        PromptDataset(ROWS, seed=5),
        FakePolicy(),
        Letters(),
        group_size=GROUP_SIZE,
        groups=EPOCHS * len(ROWS),
        concurrency=3 * GROUP_SIZE,
    )
    pipeline = (
        source(prompts, on=processes(2))
        .then(RewardBridge(functions=[RewardFunction(answered, reads_text=False)]))
        .then(AdvantageNormalizer("none"))
        .then(Batcher(max_tokens=512, sequences=STEP_GROUPS * GROUP_SIZE))
        .sink(SinkTrainer(Recorder(killed_in_step), checkpoint_every=4))
    )
    await pipeline.run(folder=folder)


if __name__ == "__main__":
    anyio.run(run, Path(sys.argv[1]), int(sys.argv[2]))
