"""Run ROLL's pipeline on a CPU, and write what it logs: `python -m tests.roll_real.piped <options of config_of, JSON>`.

A process has one: ROLL keeps handles of Ray's actors in its modules, and gives no resource back.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.roll_real.configuration import config_of
from tests.roll_real.conftest import start_ray


def main(model: str, output: str, **options: Any) -> None:
    """Run the pipeline; what it logs is in `logged.jsonl` of `output`, a line for each step."""
    start_ray()
    pipeline = import_module("tests.roll_real.on_a_cpu").CpuPipeline(config_of(Path(model), Path(output), **options))
    with Path(output, "logged.jsonl").open("w", buffering=1) as file:
        pipeline.tracker.log = lambda values, step: file.write(json.dumps({"step": step, **values}) + "\n")
        pipeline.run()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
