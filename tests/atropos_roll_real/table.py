"""Run a configuration of ROLL's on a CPU, and print a table of what ROLL has logged.

`python -m tests.atropos_roll_real.table examples/atropos_roll/gsm8k.yaml FOLDER`, in the environment of `make
test-atropos-roll`, with a folder that examples/atropos_roll/prepare.py has made.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from tests.roll_real.conftest import start_ray

COLUMNS = {
    "reward": ("critic/score/mean", 3),
    "response length": ("tokens/response_length/mean", 1),
    "tokens per second": ("system/tps", 0),
    "advantages, mean": ("critic/advantages/mean", 3),
    "entropy": ("critic/entropy/mean", 3),
}
"""Headings, ROLL's names of the metrics, and digits."""

BLOCKS = 6


def run(path: Path, **changes: Any) -> Iterator[dict[str, Any]]:
    """Run ROLL's pipeline by the YAML at `path`; return what it logs, a value for each step."""
    start_ray()
    omegaconf: Any = import_module("omegaconf").OmegaConf
    values = omegaconf.to_container(omegaconf.load(path), resolve=True) | changes
    config_class = import_module("roll.pipeline.agentic.agentic_config").AgenticConfig
    config = import_module("dacite").from_dict(data_class=config_class, data=values)
    config.num_gpus_per_node = 0  # ROLL counts a CPU as one device, and asks Ray for it by a key that Ray refuses
    pipeline = import_module("tests.roll_real.on_a_cpu").CpuPipeline(config)
    logged = Path("logged.jsonl")
    with logged.open("w", buffering=1) as file:
        pipeline.tracker.log = lambda values, step: file.write(json.dumps({"step": step, **values}) + "\n")
        pipeline.run()
    return (json.loads(line) for line in logged.read_text().splitlines())


def rows(logged: list[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield the means of each column over the steps of a block."""
    bounds = [len(logged) * block // BLOCKS for block in range(BLOCKS + 1)]
    for begin, end in pairwise(bounds):
        values = (f"{mean(line[name] for line in logged[begin:end]):.{digits}f}" for name, digits in COLUMNS.values())
        yield [f"{begin + 1}–{end}", *values]


def main() -> None:
    """Run, and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    config = options.config.absolute()
    os.chdir(options.folder)
    print("|", " | ".join(["steps", *COLUMNS]), "|")  # noqa: T201
    print("|" + "---|" * (len(COLUMNS) + 1))  # noqa: T201
    for row in rows(list(run(config))):
        print("|", " | ".join(row), "|")  # noqa: T201


if __name__ == "__main__":
    main()
