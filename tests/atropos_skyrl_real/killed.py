"""A training that prints the number of each step, and waits in its third to be killed."""

from __future__ import annotations

import sys
from pathlib import Path

LAST = 3
"""The step whose optimizer step is the last; it is neither committed nor in a checkpoint."""

if __name__ == "__main__":
    import asyncio
    import json

    import torch
    from tests.atropos_skyrl_real import pair
    from tests.skyrl_real.training import config_of, trainer_of

    torch.set_num_threads(1)
    model, data, folder, options = sys.argv[1:]
    cfg = config_of(Path(model), Path(data), Path(folder), **json.loads(options))
    trainer = trainer_of(cfg, "tests.atropos_skyrl_real.pair:generator")

    def show(step: int) -> None:
        found = {"step": step, "environments": [each.process.pid for each in pair.environments]}
        print(json.dumps(found), flush=True)  # noqa: T201 (read by the test)
        if step == LAST:
            sys.stdin.read()  # ends when the test does

    trainer.dispatch.at_step = show
    trainer.tracker.log = lambda *_, **__: None
    asyncio.run(trainer.train())
