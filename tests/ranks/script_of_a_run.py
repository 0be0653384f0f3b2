"""A training run on the ranks of a torchrun, in a folder.

    torchrun … -m tests.ranks.script_of_a_run FOLDER TIMEOUT_S [--waits]

There are twelve groups; three train in a step, and every second step writes a checkpoint. With `--waits`, the source
sends six, and waits forever, in a worker process. Each rank prints its process id, and the leader the number of every
step. In the fourth step rank N waits until FOLDER/go-N, a named pipe, has been written, if there is one, and does what
it says. The weights at the end are in FOLDER/weights.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import torch
import torch.distributed as dist
from tests.tiny_model import ReadModel
from torch.nn.parallel import DistributedDataParallel

from penstock import Batcher, SendChannel, SinkTrainer, TrajectoryGroup, processes, source
from penstock.accounting import Metrics
from penstock.losses import AdvantageWeighted
from penstock.testing import group
from penstock.torch import RankedTrainer, TorchTrainer

GROUPS, STEPS = 12, 4

DIE, GO = "die", "go"
"""What a pipe may say."""


@dataclass(frozen=True)
class Groups:
    """Sends all groups, or half of them and waits forever."""

    waits: bool = False

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        for number in range(GROUPS // 2 if self.waits else GROUPS):
            await outbox.send(sampled(number))
        if self.waits:
            await anyio.sleep_forever()


def sampled(number: int) -> TrajectoryGroup:
    """Return a group of three sequences."""
    lengths = [3, 9 + number, 5]
    advantages = np.random.default_rng(number).standard_normal(sum(lengths) + 2 * len(lengths)).astype(np.float32)
    made = group(instance_id=str(number), completion_lengths=lengths, seed=number, advantages=advantages)
    return msgspec.structs.replace(made, tokens=made.tokens % 11)


def trainer_of(model: Any) -> TorchTrainer:
    sgd = partial(torch.optim.SGD, lr=0.3, momentum=0.9)
    return TorchTrainer(model, optimizer=sgd, loss=AdvantageWeighted(), micro_batch_tokens=48)


def train(trainer: TorchTrainer | RankedTrainer, folder: Path, *, waits: bool = False) -> None:
    """Train, as a user does, and write the weights."""
    metrics = Metrics(lambda _, step: print(f"step {step}", flush=True))  # noqa: T201 (what the test reads)
    sink = SinkTrainer(trainer, checkpoint_every=2)
    first = source(Groups(waits), on=processes(1)) if waits else source(Groups())
    pipeline = first.then(Batcher(max_tokens=1024, sequences=9)).sink(sink)
    anyio.run(partial(pipeline.run, metrics=metrics, folder=folder))
    weights = {name: tensor.tolist() for name, tensor in trainer.weights().items()}
    (folder / "weights.json").write_text(json.dumps(weights))


def obey(pipe: Path) -> None:
    """Wait until `pipe` was written, and do what it says."""
    print(f"rank {dist.get_rank()} waits", flush=True)  # noqa: T201 (what the test reads)
    said = pipe.read_text()
    pipe.unlink()
    if said == DIE:
        os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, timeout_s: float, *, waits: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    print(f"rank {dist.get_rank()} is process {os.getpid()}", flush=True)  # noqa: T201 (as above)
    model, pipe = DistributedDataParallel(ReadModel()), folder / f"go-{dist.get_rank()}"
    trainer = trainer_of(model)
    model.register_forward_pre_hook(lambda *_: obey(pipe) if trainer.steps == STEPS - 1 and pipe.exists() else None)
    with RankedTrainer(trainer) as ranked:
        if ranked.leads:
            train(ranked, folder, waits=waits)
        else:
            ranked.follow()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), waits="--waits" in sys.argv)
