"""A small run of a synchronous schedule with everything that writes into its folder: evaluation, samples, state."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import anyio
import torch
from safetensors.torch import load_file
from tests.resumption.script_of_a_run import Digits, KillPoint, Tokens
from tests.tiny_model import TinyModel

from penstock import AdvantageNormalizer, Batcher, SinkTrainer, SourceEnv, source
from penstock.policies import SamplingParams
from penstock.torch import TorchPolicy, TorchTrainer
from penstock.trackers import Samples
from penstock.training import Evaluation, latest_checkpoint
from penstock.weights import WeightPublisher

BEFORE, STEPS, EVERY = 4, 6, 2
"""Steps before the run is continued, steps at its end, and those between two checkpoints."""

GROUP_SIZE, STEP_GROUPS = 4, 2


class Questions(Digits):
    """A few questions, which are evaluated."""

    def __len__(self) -> int:
        return 3


def evaluation() -> Evaluation:
    sampled = SamplingParams(max_completion_tokens=3)
    return Evaluation(sets={"digits": partial(Questions, KillPoint())}, every=EVERY, samples=2, sampling=sampled)


def trained(folder: Path, steps: int, *, skip_damaged: bool = False) -> dict[str, list[float]]:
    """Run until `steps` are done; return the weights as they are in the last checkpoint."""
    anyio.run(partial(_run, folder, steps, skip_damaged=skip_damaged))
    latest = latest_checkpoint(folder / "checkpoints")
    assert latest is not None
    assert latest.name == f"step-{steps:08d}"
    tensors = load_file(latest / "model.safetensors")
    return {name: tensor.flatten().tolist() for name, tensor in tensors.items()}


async def _run(folder: Path, steps: int, *, skip_damaged: bool) -> None:
    model, evaluated = TinyModel(vocabulary=11), evaluation()
    trainer = TorchTrainer(model, optimizer=partial(torch.optim.AdamW, lr=0.02))
    async with WeightPublisher(model.state_dict()) as publisher:
        env = SourceEnv(
            partial(Digits, KillPoint()),
            TorchPolicy(partial(TinyModel, vocabulary=11), eos_id=10, weights=publisher.url, seed=3),
            Tokens(),
            group_size=GROUP_SIZE,
            sampling=SamplingParams(max_completion_tokens=3),
            evaluation=evaluated,
        )
        sink = SinkTrainer(
            trainer,
            publisher,
            max_steps=steps,
            checkpoint_every=EVERY,
            keep_checkpoints=2,
            samples=Samples(every=1, count=1),
        )
        pipeline = (
            source(env, max_lag=0)
            .then(AdvantageNormalizer("global"))
            .then(Batcher(max_tokens=256, sequences=STEP_GROUPS * GROUP_SIZE))
            .sink(sink)
        )
        await pipeline.run(folder=folder, config={"lr": 0.02}, skip_damaged=skip_damaged)
