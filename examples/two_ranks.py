"""Two ranks train one model on one stream of batches, with DistributedDataParallel.

    torchrun --nproc-per-node 2 examples/two_ranks.py

Rank 0 runs the pipeline, and the other rank takes part in its steps. Each receives a share of every batch, balanced by
tokens, and the step equals that of a single process: `python examples/two_ranks.py` prints the same losses. For FSDP2,
call `fully_shard` on the model instead of wrapping it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial

import anyio
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from arithmetic.model import Shape, Transformer
from penstock import AdvantageNormalizer, Batcher, SendChannel, SinkTrainer, TrajectoryGroup, source
from penstock.accounting import Metrics
from penstock.losses import AdvantageWeighted
from penstock.torch import RankedTrainer, TorchTrainer

VOCABULARY, LONGEST = 16, 64


@dataclass(frozen=True)
class Walks:
    """A source of random walks of very different lengths, rewarded for a high last token."""

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        """Send twenty groups of four."""
        random = np.random.default_rng(seed=0)
        for number in range(20):
            walks = [random.integers(VOCABULARY, size=length).tolist() for length in random.integers(2, LONGEST, 4)]
            group = TrajectoryGroup.build(
                env="walks",
                instance_id=str(number),
                sequences=walks,
                loss_mask=[[False] + [True] * (len(walk) - 1) for walk in walks],
                rewards=[walk[-1] / VOCABULARY for walk in walks],
            )
            await outbox.send(group)


def train(trainer: TorchTrainer | RankedTrainer) -> None:
    """Run the pipeline, and print the loss of every step."""
    metrics = Metrics(lambda found, step: print(f"step {step}: loss {found['loss']:+.4f}"))
    batcher = Batcher(max_tokens=2048, sequences=16)
    pipeline = source(Walks()).then(AdvantageNormalizer("grpo")).then(batcher).sink(SinkTrainer(trainer))
    anyio.run(partial(pipeline.run, metrics=metrics))


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Transformer(Shape(vocabulary=VOCABULARY, longest=LONGEST))
    adam = partial(torch.optim.AdamW, lr=0.003)
    trainer_of = partial(TorchTrainer, optimizer=adam, loss=AdvantageWeighted(), micro_batch_tokens=256)
    if "RANK" not in os.environ:  # no torchrun
        train(trainer_of(model))
    else:
        dist.init_process_group("gloo")
        with RankedTrainer(trainer_of(DistributedDataParallel(model))) as trainer:
            if trainer.leads:
                train(trainer)
            else:
                trainer.follow()
        dist.destroy_process_group()
