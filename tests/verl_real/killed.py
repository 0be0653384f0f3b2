"""A training that prints its samplers when its fifth step has asked for groups, and waits for a kill."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.verl_real.conftest import process_group, running_transfer_queue, training_of
from tests.verl_real.training import SyncOnACpu, train
from tests.worker_processes import worker_processes


class Waiting(SyncOnACpu):
    def prepare_step(self) -> Any:
        prepared = super().prepare_step()
        if self.global_steps == 5:
            print("samplers", *worker_processes(), flush=True)  # noqa: T201 (read by the test)
            sys.stdin.read()
        return prepared


if __name__ == "__main__":
    model, folder = Path(sys.argv[1]), Path(sys.argv[2])
    with running_transfer_queue(), process_group(folder):
        train(training_of(model, folder, *sys.argv[3:]), Waiting)
