"""Ranks whose run is continued with other values, beside a single process that gets the same ones.

    python -m tests.ranks.script_of_changes FOLDER KIND

Each rank writes the end of every part of its runs to FOLDER/<kind>-<rank>.json.
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
from tests.ranks.script_of_a_run import Groups
from tests.ranks.script_of_ranks import ddp, ended_ranks, fsdp, listed, start
from tests.resumption.damaged_files import one_bit
from tests.tiny_model import ReadModel
from torch.distributed.fsdp import OffloadPolicy

from penstock import Batcher, SinkTrainer, source
from penstock.errors import CheckpointDamaged, PeerLost, RunDiffers
from penstock.losses import AdvantageWeighted
from penstock.torch import RankedTrainer, TorchTrainer

MakeModel = Callable[[], Any]

SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.9)

APPLIED: dict[str, Any] = {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.5, weight_decay=0.1)}
REFUSED: dict[str, Any] = {"optimizer": torch.optim.AdamW}
FREE: dict[str, Any] = {**APPLIED, "micro_batch_tokens": 16}


def trainer(model: Any, *, optimizer: Any = SGD, micro_batch_tokens: int = 48) -> TorchTrainer:
    return TorchTrainer(
        model, optimizer=optimizer, loss=AdvantageWeighted(), micro_batch_tokens=micro_batch_tokens, max_grad_norm=None
    )


def run(trained: Any, folder: Path, steps: int, *, skip_damaged: bool = False) -> None:
    sink = SinkTrainer(trained, max_steps=steps, checkpoint_every=1)
    pipeline = source(Groups()).then(Batcher(max_tokens=1024, sequences=9)).sink(sink)
    anyio.run(partial(pipeline.run, folder=folder, skip_damaged=skip_damaged))


def part(make: MakeModel, folder: Path, steps: int, *, skip_damaged: bool = False, **options: Any) -> dict[str, Any]:
    """Run the folder's run until `steps` are done, all ranks together; return how it ended on this rank."""
    raw, error = trainer(make(), **options), ""
    try:
        with RankedTrainer(raw) as ranked:
            if ranked.leads:
                run(ranked, folder, steps, skip_damaged=skip_damaged)
            else:
                ranked.follow()
    except (CheckpointDamaged, PeerLost, RunDiffers) as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {"error": error, "steps": raw.steps, "weights": listed(raw.weights())}


def alone(folder: Path, steps: int, **options: Any) -> dict[str, Any]:
    """Do what `part` does in a single process."""
    raw = trainer(ReadModel(), **options)
    run(raw, folder, steps)
    return {"steps": raw.steps, "weights": listed(raw.weights())}


def change(make: MakeModel, folder: Path, kind: str) -> None:
    """Train two steps; continue with each class of changes, and from a checkpoint that is damaged."""
    ranked, single, leads = folder / kind, folder / f"{kind}-alone", dist.get_rank() == 0
    found = {"first": part(make, ranked, 2), "applied": part(make, ranked, 3, **APPLIED)}
    if leads:
        alone(single, 2)
        found["applied alone"] = alone(single, 3, **APPLIED)
    found["refused"] = part(make, ranked, 4, **REFUSED)
    if leads:
        one_bit(ranked / "checkpoints" / "step-00000003" / "optimizer.pt")
    dist.barrier()
    found["damaged"] = part(make, ranked, 4, **APPLIED)
    found["free"] = part(make, ranked, 4, skip_damaged=True, **FREE)
    if leads:
        found["free alone"] = alone(single, 4, **APPLIED)
    (folder / f"{kind}-{dist.get_rank()}.json").write_text(json.dumps(found))


KINDS: dict[str, MakeModel] = {"ddp": ddp, "fsdp": lambda: fsdp(OffloadPolicy(), ReadModel())}


def main(folder: Path, kind: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*returned a view tensor")
    trainer(ReadModel())  # what torch imports late, for all children
    work = partial(change, KINDS[kind])
    codes = ended_ranks({(kind, rank): start(folder, kind, rank, 2, work) for rank in range(2)})
    assert not any(codes.values()), codes


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
