"""From an optimizer step to a sampler's model, over a real segment and a real socket."""

from __future__ import annotations

from functools import partial

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import torch
from tests.tiny_model import TinyModel

from penstock import SinkTrainer, TrainBatch
from penstock.losses import AdvantageWeighted
from penstock.testing import drive_sink, group
from penstock.torch import TorchTrainer
from penstock.weights import WeightPublisher, WeightSubscriber


def made(instance: int) -> TrainBatch:
    packed = TrainBatch.pack([group(instance_id=str(instance))])
    tokens = packed.tokens % 11
    return msgspec.structs.replace(packed, tokens=tokens, advantages=np.ones(len(tokens), np.float32))


def trainer_of(model: TinyModel) -> TorchTrainer:
    """Make a trainer in a thread: the first optimizer of torch imports its compiler, which takes a second."""
    return TorchTrainer(
        model, optimizer=partial(torch.optim.SGD, lr=0.1), loss=AdvantageWeighted(), micro_batch_tokens=8
    )


async def test_a_sampler_holds_the_trainers_weights_after_every_step() -> None:
    model = TinyModel(seed=1)
    trainer = await anyio.to_thread.run_sync(trainer_of, model)
    sampled, before = TinyModel(seed=2), TinyModel(seed=1)

    async with WeightPublisher(trainer.weights()) as publisher, WeightSubscriber(publisher.url) as subscriber:
        subscriber.attach(sampled)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drive_sink, SinkTrainer(trainer, publisher, sampling="pause"), map(made, range(4)))
            for step in range(5):
                await subscriber.newer(than=step - 1)
                async with subscriber.sampling():
                    await anyio.to_thread.run_sync(subscriber.refresh)
        assert await anyio.to_thread.run_sync(subscriber.refresh) == trainer.steps == 4

    assert all(torch.equal(mine, theirs) for mine, theirs in zip(sampled.parameters(), model.parameters(), strict=True))
    assert not torch.equal(sampled.head.weight, before.head.weight)
