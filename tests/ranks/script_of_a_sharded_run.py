"""A rank of a configured run on a machine with too little memory for the whole model on each.

    torchrun --nproc-per-node 2 -m tests.ranks.script_of_a_sharded_run CONFIG BYTES

The file rank-<i> beside the configuration has the number of parameters of this rank.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from torch import nn

from penstock._stages.models.torch_sharding import shard
from penstock._stages.training_run import torch_memory
from penstock.runs import load_run_config, train


def main(config: str, free: str) -> None:
    """Train."""
    of_rank: list[int] = []

    def sharded(model: nn.Module, *others: Any) -> None:
        shard(model, *others)
        parts: list[Any] = [*model.parameters()]
        of_rank.append(sum(part.to_local().numel() for part in parts))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch_memory, "total_bytes", lambda: int(free))
        patched.setattr("penstock._stages.training_run.torch_parts.shard", sharded)
        anyio.run(partial(train, load_run_config(Path(config)), view=None))
    (Path(config).parent / f"rank-{os.environ['RANK']}").write_text(str(sum(of_rank)))


if __name__ == "__main__":
    main(*sys.argv[1:])
