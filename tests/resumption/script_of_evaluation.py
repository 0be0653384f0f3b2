"""Runs of a synchronous schedule that evaluate, of which one is killed in the middle of an evaluation.

    python -m tests.resumption.script_of_evaluation FOLDER

One in FOLDER/without does not evaluate; one in FOLDER/whole is not killed; those in FOLDER/killed-… are killed in their
evaluation of one step, and run again.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests.resumption.script_of_a_run import Digits, Killed, KillPoint, Tokens, import_late_parts, in_child
from tests.tiny_model import TinyModel

from penstock import AdvantageNormalizer, Batcher, SinkTrainer, SourceEnv, source
from penstock.policies import SamplingParams
from penstock.torch import TorchPolicy
from penstock.trackers import Samples
from penstock.training import Evaluation
from penstock.weights import WeightPublisher

STEPS = 6
EVERY = 2
GROUP_SIZE, STEP_GROUPS = 4, 2
QUESTIONS, SAMPLES = 5, 2
KILLED = {"in the middle": 2, "at the end": 6}
"""The step in whose evaluation a run is killed."""


class Questions(Digits):
    """A few questions; kills the process in the evaluation of step `kill_at`."""

    def __init__(self, kill_at: int | None) -> None:
        super().__init__(KillPoint())
        self._kill_at = kill_at
        self._scored = 0

    def __len__(self) -> int:
        return QUESTIONS

    def score_answer(self, answer: str, entry: Mapping[str, Any]) -> float:
        if self._kill_at is not None and int(entry["question"]) == QUESTIONS - 1:
            Evaluated.count += 1
            if Evaluated.count == SAMPLES * (self._kill_at // EVERY + 1):
                os.kill(os.getpid(), signal.SIGKILL)
        return super().score_answer(answer, entry)


class Evaluated:
    """Counts the completions of the last question in all evaluations of a process."""

    count = 0


async def run(folder: Path, kill_point: KillPoint, *, kill_at: int | None = None, evaluates: bool = True) -> None:
    model = TinyModel(vocabulary=11)
    trainer = Killed(kill_point, model)
    questions = partial(Questions, kill_at)
    evaluation = Evaluation(
        sets={"digits": questions},
        every=EVERY,
        samples=SAMPLES,
        sampling=SamplingParams(max_completion_tokens=4),
        best="eval/digits/reward",
    )
    async with WeightPublisher(model.state_dict()) as publisher:
        env = SourceEnv(
            partial(Digits, kill_point),
            TorchPolicy(partial(TinyModel, vocabulary=11), eos_id=10, weights=publisher.url, seed=3),
            Tokens(),
            group_size=GROUP_SIZE,
            sampling=SamplingParams(max_completion_tokens=4),
            evaluation=evaluation if evaluates else None,
        )
        sink = SinkTrainer(
            trainer,
            publisher,
            max_steps=STEPS,
            checkpoint_every=EVERY,
            keep_checkpoints=1,
            samples=Samples(every=STEPS),
        )
        pipeline = (
            source(env, max_lag=0)
            .then(AdvantageNormalizer("grpo"))
            .then(Batcher(max_tokens=256, sequences=STEP_GROUPS * GROUP_SIZE))
            .sink(sink)
        )
        await pipeline.run(folder=folder)


def main(folder: Path) -> None:
    import_late_parts()
    torch.set_num_threads(1)
    assert in_child(partial(run, evaluates=False), folder / "without", KillPoint()) == 0
    assert in_child(run, folder / "whole", KillPoint()) == 0
    for name, step in KILLED.items():
        assert in_child(partial(run, kill_at=step), folder / name, KillPoint()) == -signal.SIGKILL, name
        assert in_child(run, folder / name, KillPoint()) == 0, name


if __name__ == "__main__":
    main(Path(sys.argv[1]))
