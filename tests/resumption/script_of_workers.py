"""A run of a synchronous schedule, sampled by two worker processes, whose trainer is killed in its third step.

    python -m tests.resumption.script_of_workers FOLDER

One in FOLDER/whole that is not killed, and one in FOLDER/killed, run until it dies, and then again.
"""

from __future__ import annotations

import signal
import sys
from functools import partial
from pathlib import Path

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
from penstock.policies import SamplingParams
from penstock.torch import TorchPolicy
from penstock.weights import WeightPublisher

STEP_GROUPS = 4
WORKERS = 2


async def run(folder: Path, kill_point: KillPoint) -> None:
    """Run as a user's script does, and resume when it is started again."""
    torch.set_num_threads(1)
    model = TinyModel(vocabulary=11)
    trainer = Killed(kill_point, model)
    async with WeightPublisher(model.state_dict()) as publisher:
        policy = TorchPolicy(partial(TinyModel, vocabulary=11), eos_id=10, weights=publisher.url, seed=3)
        make_env = partial(Digits, KillPoint())
        env = SourceEnv(
            make_env,
            policy,
            Tokens(),
            group_size=GROUP_SIZE,
            sampling=SamplingParams(max_completion_tokens=4),
            max_lag=0,
            step_groups=STEP_GROUPS,
        )
        pipeline = (
            source(env, on=processes(WORKERS))
            .then(AdvantageNormalizer("grpo"))
            .then(Batcher(max_tokens=512, sequences=STEP_GROUPS * GROUP_SIZE, max_lag=0))
            .sink(SinkTrainer(trainer, publisher, max_steps=STEPS, checkpoint_every=CHECKPOINT_EVERY))
        )
        await pipeline.run(folder=folder)


def main(folder: Path) -> None:
    import_late_parts()
    assert in_child(run, folder / "whole", KillPoint()) == 0
    assert in_child(run, folder / "killed", KillPoint("stepped", 3)) == -signal.SIGKILL
    assert in_child(run, folder / "killed", KillPoint()) == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]))
