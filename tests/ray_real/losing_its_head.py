"""A script whose run trains three steps on a cluster, and then waits; prints how it ended, with its checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import anyio
from tests.processes.script_of_a_stopped_run import Numbered, Pack, Trainer, write_line

from penstock import SinkTrainer, TrainBatch, ray, source
from penstock.errors import ClusterLost


class Telling(Trainer):
    """Prints its third step."""

    def step(self, batch: TrainBatch, /) -> Mapping[str, float]:
        metrics = super().step(batch)
        if self.steps == 3:
            write_line("step 3")
        return metrics


if __name__ == "__main__":
    address, folder = sys.argv[1:]
    actors = ray(workers=2, num_cpus=0.5, address=address)
    pipeline = source(Numbered(6, waits=True), on=actors).then(Pack()).sink(SinkTrainer(Telling(None)))
    try:
        anyio.run(partial(pipeline.run, folder=folder))
    except ClusterLost as lost:
        assert pipeline.report is not None
        assert pipeline.report.balance.balanced
        write_line(f"ClusterLost, {Path(pipeline.report.checkpoint).name}: {str(lost).partition(',')[0]}")
        raise
