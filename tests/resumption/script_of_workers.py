"""Runs of a synchronous schedule, whose prompts are sampled by one or three worker processes.

    python -m tests.resumption.script_of_workers FOLDER

Rows are sampled one at a time, for what a kernel computes of one may depend on those beside it. FOLDER/alone has one
worker, the others three, which cannot share the prompts of a step evenly: FOLDER/whole is not killed, in FOLDER/sampler
a worker is killed while it samples, and FOLDER/trainer is run until its trainer is killed in its third step, and then
again.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests.resumption.script_of_a_run import (
    CHECKPOINT_EVERY,
    GROUP_SIZE,
    STEPS,
    Digits,
    Killed,
    KillPoint,
    Tokens,
    import_late_parts,
    in_child,
)
from tests.tiny_model import TinyModel

from penstock import AdvantageNormalizer, Batcher, SinkTrainer, SourceEnv, processes, source
from penstock.environments import Environment
from penstock.policies import SamplingParams
from penstock.torch import TorchPolicy
from penstock.weights import WeightPublisher

STEP_GROUPS = 4

ALIVE = partial(Digits, KillPoint())

SCORED = 2 * GROUP_SIZE
"""Answers that the killed worker scores in its life."""


class Deadly(Digits):
    """The first worker that has scored so many answers is killed."""

    def __init__(self, mark: Path) -> None:
        super().__init__(KillPoint())
        self._mark = mark
        self._scored = 0

    def score_answer(self, answer: str, entry: Mapping[str, Any]) -> float:
        self._scored += 1
        if self._scored > SCORED and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().score_answer(answer, entry)


async def run(
    folder: Path, kill_point: KillPoint, make_env: Callable[[], Environment] = ALIVE, workers: int = 3
) -> None:
    """Run as a user's script does, and resume when it is started again; with 0 workers in the process of the run."""
    torch.set_num_threads(1)
    model = TinyModel(vocabulary=11)
    trainer = Killed(kill_point, model)
    async with WeightPublisher(model.state_dict()) as publisher:
        policy = TorchPolicy(partial(TinyModel, vocabulary=11), eos_id=10, weights=publisher.url, seed=3, max_rows=1)
        env = SourceEnv(
            make_env,
            policy,
            Tokens(),
            group_size=GROUP_SIZE,
            sampling=SamplingParams(max_completion_tokens=4),
        )
        pipeline = (
            (source(env, on=processes(workers), max_lag=0) if workers else source(env, max_lag=0))
            .then(AdvantageNormalizer("grpo"))
            .then(Batcher(max_tokens=512, sequences=STEP_GROUPS * GROUP_SIZE))
            .sink(SinkTrainer(trainer, publisher, max_steps=STEPS, checkpoint_every=CHECKPOINT_EVERY))
        )
        await pipeline.run(folder=folder)


def main(folder: Path) -> None:
    import_late_parts()
    assert in_child(partial(run, workers=1), folder / "alone", KillPoint()) == 0
    assert in_child(run, folder / "whole", KillPoint()) == 0
    deadly = partial(Deadly, folder / "a worker was killed")
    assert in_child(partial(run, make_env=deadly), folder / "sampler", KillPoint()) == 0
    assert in_child(run, folder / "trainer", KillPoint("stepped", 3)) == -signal.SIGKILL
    assert in_child(run, folder / "trainer", KillPoint()) == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]))
