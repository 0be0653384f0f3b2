"""Measure ROLL's pipeline with its own sampling and with a flow: seconds a step, processor time a trajectory.

PYTHONPATH=.venv/roll python -m tests.roll_real.measured --repeats 3, after `make test-roll`. Both sample prompts of 3
letters by the same inference worker, with the same scores, and train by the same code: see `on_a_cpu`. Processor time
is that of all processes of ROLL, the first steps excluded.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.machine import tree_cpu_seconds
from tests.roll_real.configuration import BATCH, config_of
from tests.roll_real.conftest import ROOT, start_ray, write_chat_model

WARM_UP = 3
"""Steps that are not counted."""

RESULT = "result.json"

OWN = {
    "env_manager_cls": "penstock.integrations.roll.ShapedEnvManager",
    "env_config": {"env": "tests.roll_real.flows:Letters"},
    "agent_system_template": "",
    "agent_template": "{observation}",
}
"""ROLL's TrajEnvManager; without `reward`, nothing of its sampling is changed."""

CONTESTANTS: dict[str, dict[str, Any]] = {
    "ROLL's own env manager": OWN,
    "a flow": {
        "env_manager_cls": "penstock.integrations.roll.FlowEnvManager",
        "flow": "tests.roll_real.flows:letters",
    },
}


def run(model: Path, folder: Path, tag: dict[str, Any], steps: int) -> tuple[float, float, float]:
    """Return (median seconds a step, longest step, CPU milliseconds a trajectory) of one run, in this process."""
    start_ray()
    config = config_of(model, folder, tag=tag, max_steps=steps, save_steps=10_000)
    pipeline = import_module("tests.roll_real.on_a_cpu").CpuPipeline(config)
    used: dict[int, float] = {}
    seconds: dict[int, float] = {}

    def log(values: dict[str, Any], step: int) -> None:
        used[step], seconds[step] = tree_cpu_seconds(), values["time/step_total"]

    pipeline.tracker.log = log
    pipeline.run()
    counted = [seconds[step] for step in range(WARM_UP, steps)]
    spent = used[steps - 1] - used[WARM_UP - 1]
    return statistics.median(counted), max(counted), spent / (len(counted) * BATCH) * 1000


def run_apart(model: Path, name: str, steps: int) -> tuple[float, float, float]:
    """Return the same, of a run in a process of its own: ROLL keeps handles of Ray's actors in its modules."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.roll_real.measured", "--steps", str(steps)]
        own = ["--contestant", name, "--model", str(model)]
        with Path(folder, "errors.txt").open("wb") as errors:
            subprocess.run([*command, *own], cwd=folder, stderr=errors, stdout=errors, check=True)
        step, longest, processor = json.loads(Path(folder, RESULT).read_text())
    return step, longest, processor


def spread(values: list[float], digits: int) -> str:
    """Return the median of `values`, with minimum and maximum."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def main() -> None:
    """Measure, in turns, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=23)
    parser.add_argument("--contestant", choices=CONTESTANTS, help="run this one alone, in this process")
    parser.add_argument("--model", type=Path, help="for it")
    options = parser.parse_args()
    if options.contestant is not None:
        found = run(options.model, Path.cwd(), CONTESTANTS[options.contestant], options.steps)
        Path(RESULT).write_text(json.dumps(found))
        return
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(str(Path(path).absolute()) for path in paths)
    with tempfile.TemporaryDirectory() as folder:
        model = write_chat_model(Path(folder))
        results: dict[str, list[tuple[float, float, float]]] = {name: [] for name in CONTESTANTS}
        for _ in range(options.repeats):
            for name in CONTESTANTS:
                results[name].append(run_apart(model, name, options.steps))
                print(name, *results[name][-1], flush=True)  # noqa: T201 (a run takes minutes)
        print("| sampling | s a step | longest step, s | CPU ms a trajectory |\n|---|---|---|---|")  # noqa: T201
        for name, measured in results.items():
            step, longest, processor = (list(column) for column in zip(*measured, strict=True))
            print(f"| {name} | {spread(step, 2)} | {max(longest):.1f} | {spread(processor, 1)} |")  # noqa: T201


if __name__ == "__main__":
    main()
