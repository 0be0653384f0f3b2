"""Two ranks share a model, publish it, save it and go on from there; by how much each grows for that is measured.

    python -m tests.ranks.script_of_sharded_memory FOLDER

Rank 0 writes to FOLDER/found.json what it found, and the checkpoints to FOLDER/ranked and FOLDER/alone.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import torch
import torch.distributed as dist
from anyio.to_thread import run_sync
from tests.ranks.script_of_ranks import TRAINED, ended_ranks, made, start
from tests.tiny_model import ReadModel
from torch.distributed.fsdp import fully_shard

from penstock.losses import PPOClip
from penstock.torch import RankedTrainer, TorchTrainer, adamw
from penstock.weights import WeightPublisher, WeightSubscriber

__all__ = ["main"]

WIDTH, VOCABULARY, LAYERS = 1024, 4096, 4


def model(*, sharded: bool) -> Any:
    """Return a model of 130 MiB whose largest tensor, of 16 MiB, is tied."""
    whole = ReadModel(width=WIDTH, vocabulary=VOCABULARY, layers=LAYERS)
    whole.head.weight = whole.token.weight
    if sharded:
        for layer in (*whole.attention, *whole.mlp):
            fully_shard(layer)
        fully_shard(whole)
    return whole


def trainer(trained: Any) -> TorchTrainer:
    return TorchTrainer(trained, optimizer=partial(adamw, lr=1e-3), loss=PPOClip())


def memory(pid: int, which: str) -> int:
    """Return the bytes that a process has now (`VmRSS`), or had at most (`VmHWM`)."""
    found = re.search(rf"{which}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def forget_most(pid: int) -> None:
    """Let the most that a process had be what it has now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


async def growth(pids: list[int], work: Callable[[], Awaitable[object]]) -> list[int]:
    """Return by how many bytes each process grew within `work`."""
    for pid in pids:
        forget_most(pid)
    before = [memory(pid, "VmRSS") for pid in pids]
    await work()
    return [memory(pid, "VmHWM") - had for pid, had in zip(pids, before, strict=True)]


def resume(ranked: RankedTrainer, checkpoint: Path) -> None:
    """Resume, and wait until the other rank has too."""
    ranked.resume(checkpoint)
    _ = ranked.weights()["head.bias"]


async def lead(ranked: RankedTrainer, pids: list[int], folder: Path) -> dict[str, Any]:
    ranked.step(made(0))
    found: dict[str, Any] = {}
    received = model(sharded=False)
    async with WeightPublisher(ranked.weights()) as publisher, WeightSubscriber(publisher.url) as subscriber:
        subscriber.attach(received)
        for version in (1, 2):  # their pages belong to this process from then on
            await publisher.publish(ranked.weights(), version)
        found["publish"] = await growth(pids, lambda: publisher.publish(ranked.weights(), 3))
        while subscriber.refresh() < 3:
            await subscriber.newer()
        found["save"] = await growth(pids, lambda: run_sync(ranked.save, folder / "ranked", TRAINED))
        checkpoint = folder / "ranked/step-00000001"
        found["resume"] = await growth(pids, lambda: run_sync(resume, ranked, checkpoint))
        alone = trainer(model(sharded=False))
        alone.resume(checkpoint)
        alone.save(folder / "alone", TRAINED)
        weights = alone.weights()
        found["differ"] = [name for name, each in received.state_dict().items() if not each.equal(weights[name])]
    found["losses"] = [each.step(made(1))["loss"] for each in (ranked, alone)]
    return found


def work(folder: Path, kind: str) -> None:
    del kind
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    with RankedTrainer(trainer(model(sharded=True))) as ranked:
        if ranked.leads:
            found = anyio.run(lead, ranked, [int(pid) for pid in pids], folder)
            (folder / "found.json").write_text(json.dumps(found))
        else:
            ranked.follow()


def main(folder: Path) -> None:
    """Run both ranks."""
    torch.set_num_threads(1)
    trainer(ReadModel())  # what torch imports late, for both children
    pids = {("sharded", rank): start(folder, "sharded", rank, 2, work) for rank in range(2)}
    assert not any(ended_ranks(pids).values())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
