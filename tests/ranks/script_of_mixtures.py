"""Two ranks, of DistributedDataParallel and of FSDP2, replay the experts of a mixture, beside a single process.

    python -m tests.ranks.script_of_mixtures FOLDER

Rank r writes to FOLDER/<kind>-<r>.json what it found.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import torch
import torch.distributed as dist
from tests.models_hf.mixtures import QWEN3, SGD, Distance, batch_of, disturbed, sampled, write_mixture
from tests.ranks.script_of_ranks import ended_ranks, plain, start
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from penstock.models import HFModel
from penstock.torch import RankedTrainer, TorchTrainer


def model(folder: Path) -> HFModel:
    return disturbed(HFModel.from_pretrained(folder / "mixture", gradient_checkpointing=True))


def ddp(folder: Path) -> Any:
    return DistributedDataParallel(model(folder))


def fsdp(folder: Path) -> Any:
    whole = model(folder)
    for layer in whole.module.get_decoder().layers:
        fully_shard(layer)
    return fully_shard(whole)


def trainer(trained: Any) -> tuple[TorchTrainer, Distance]:
    loss = Distance()
    options: dict[str, Any] = {"router_replay": "R3", "router_aux_loss": 0.1, "micro_batch_tokens": 40}
    return TorchTrainer(trained, optimizer=SGD, loss=loss, updates=2, **options), loss


def train(make: Callable[[Path], Any], folder: Path, kind: str) -> None:
    """Train a step; the leader trains it as a single process too."""
    raw, loss = trainer(make(folder))
    found: dict[str, Any] = {}
    with RankedTrainer(raw) as ranked:
        if ranked.leads:
            alone, _ = trainer(model(folder))
            batch = batch_of(anyio.run(sampled, partial(HFModel.from_pretrained, folder / "mixture")))
            found["metrics"] = plain(alone.step(batch)), plain(ranked.step(batch))
            pairs = zip(alone.weights().values(), ranked.weights().values(), strict=True)
            found["weights"] = max(float((one - other).abs().max()) for one, other in pairs)
        else:
            ranked.follow()
    found["largest"] = float((loss.seen[0] - loss.behavior[0]).abs().max())
    (folder / f"{kind}-{dist.get_rank()}.json").write_text(json.dumps(found))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*returned a view tensor")
    write_mixture(folder / "mixture", **QWEN3)
    kinds = {"ddp": ddp, "fsdp": fsdp}
    pids = {
        (kind, rank): start(folder, kind, rank, 2, partial(train, make))
        for kind, make in kinds.items()
        for rank in range(2)
    }
    codes = ended_ranks(pids)
    assert not any(codes.values()), codes


if __name__ == "__main__":
    main(Path(sys.argv[1]))
