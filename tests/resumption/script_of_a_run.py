"""A run of a synchronous schedule in a folder, which kills itself by SIGKILL at a given moment.

    python -m tests.resumption.script_of_a_run FOLDER

Torch takes seconds to import, so one process makes all runs, each in a child: an uninterrupted one in FOLDER/whole, and
for each of `DEATHS` one in FOLDER/<moment>-<nth>, run until it dies, and then again.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import torch
from tests.tiny_model import TinyModel

from penstock import (
    AdvantageNormalizer,
    Batcher,
    GroupId,
    ReceiveChannel,
    SendChannel,
    SinkTrainer,
    SourceEnv,
    TrainBatch,
    TrajectoryGroup,
    drop,
    source,
)
from penstock.policies import SamplingParams
from penstock.torch import TorchPolicy, TorchTrainer
from penstock.weights import WeightPublisher

STEPS = 5
CHECKPOINT_EVERY = 2
GROUP_SIZE = 4
STEP_GROUPS = 3

DEATHS = [
    ("stepped", 1),  # nothing is kept yet
    ("emitted", 2),  # there are metrics of two steps that no checkpoint holds
    ("half saved", 2),
    ("half removed", 1),  # the only checkpoint is that of step 4, and a part of an older one is left
    ("scored", 60),  # while the prompts of the last step are sampled
]
"""The moment at which a run kills itself: an action, and how often it was done."""


class KillPoint:
    """Kills this process when the moment has come that is asked for."""

    def __init__(self, moment: str = "", nth: int = 0) -> None:
        self._moment = moment
        self._left = nth

    def at(self, moment: str) -> None:
        if moment == self._moment:
            self._left -= 1
            if not self._left:
                os.kill(os.getpid(), signal.SIGKILL)


class Digits:
    """Scores how many letters of the answer are the last digit of the question. Answers are scored in threads."""

    def __init__(self, kill_point: KillPoint) -> None:
        self._kill_point = kill_point

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"question": str(index % 97)}

    def score_answer(self, answer: str, entry: Mapping[str, Any]) -> float:
        self._kill_point.at("scored")
        return sum(letter == str(entry["question"])[-1] for letter in answer) / 3


class Tokens:
    """Ten digits, and the end."""

    eos_id = 10

    def encode(self, text: str) -> list[int]:
        return [int(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(str, ids))


class Killed(TorchTrainer):
    def __init__(self, kill_point: KillPoint, model: TinyModel) -> None:
        super().__init__(model, optimizer=partial(torch.optim.AdamW, lr=0.02), micro_batch_tokens=24)
        self._kill_point = kill_point

    def step(self, batch: TrainBatch) -> dict[str, float]:
        metrics = super().step(batch)
        self._kill_point.at("stepped")
        return metrics

    def save(self, folder: str | Path, committed: Mapping[GroupId, int]) -> Path:
        self._kill_point.at("emitted")
        return super().save(folder, committed)

    def _write(self, *args: Any, **kwargs: Any) -> None:
        super()._write(*args, **kwargs)
        self._kill_point.at("half saved")


class Varied:
    """Drops groups whose rewards are all alike, so that more have to be begun for a step."""

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        async for group in inbox:
            if np.ptp(group.rewards):
                await outbox.send(group)
            else:
                drop(group, "filtered", "all alike")


def remove_in_two_steps(kill_point: KillPoint) -> None:
    """Patch the removal of a checkpoint, so that the run can be killed in it."""
    rmtree = shutil.rmtree

    def remove_first_file(path: Path, **options: Any) -> None:
        if path.name.endswith("-removed"):
            for file in [*path.iterdir()][:1]:  # none after a kill just before the folder was removed
                file.unlink()
            kill_point.at("half removed")
        rmtree(path, **options)

    shutil.rmtree = remove_first_file  # type: ignore[assignment]


async def run(folder: Path, kill_point: KillPoint) -> None:
    """Run as a user's script does, and resume when it is started again."""
    remove_in_two_steps(kill_point)
    model = TinyModel(vocabulary=11)
    trainer = Killed(kill_point, model)
    async with WeightPublisher(model.state_dict()) as publisher:
        policy = TorchPolicy(partial(TinyModel, vocabulary=11), eos_id=10, weights=publisher.url, seed=3)
        make_env = partial(Digits, kill_point)
        env = SourceEnv(
            make_env,
            policy,
            Tokens(),
            group_size=GROUP_SIZE,
            sampling=SamplingParams(max_completion_tokens=4),
        )
        pipeline = (
            source(env, max_lag=0)
            .then(Varied())
            .then(AdvantageNormalizer("global"))
            .then(Batcher(max_tokens=256, sequences=STEP_GROUPS * GROUP_SIZE))
            .sink(
                SinkTrainer(trainer, publisher, max_steps=STEPS, checkpoint_every=CHECKPOINT_EVERY, keep_checkpoints=1)
            )
        )
        await pipeline.run(folder=folder)


def in_child(run: Callable[[Path, KillPoint], Awaitable[None]], folder: Path, kill_point: KillPoint) -> int:
    """Run `run` in a child, and return its exit status; −9 if it was killed."""
    pid = os.fork()
    if not pid:
        try:
            anyio.run(run, folder, kill_point)
        except BaseException:  # noqa: BLE001 (the child must not go on as its parent)
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def import_late_parts() -> None:
    """Import modules that torch imports late, once for all children."""
    torch.set_num_threads(1)
    TorchTrainer(TinyModel(vocabulary=11), optimizer=torch.optim.AdamW)


def main(folder: Path) -> None:
    import_late_parts()
    assert in_child(run, folder / "whole", KillPoint()) == 0
    for moment, nth in DEATHS:
        kept = folder / f"{moment}-{nth}"
        assert in_child(run, kept, KillPoint(moment, nth)) == -signal.SIGKILL, (moment, nth)
        assert in_child(run, kept, KillPoint()) == 0, (moment, nth)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
