"""Measure ROLL's pipeline with its own sampling and with a flow: seconds a step, processor time a trajectory.

PYTHONPATH=.venv/roll python -m tests.roll_real.measured --repeats 3, after `make test-roll`. Both sample prompts of 3
letters by the same inference worker, with the same scores, and train by the same code: see `on_a_cpu`. Processor time
is that of all processes of ROLL, the first steps excluded.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
from tests.roll_real.configuration import BATCH, config_of
from tests.roll_real.conftest import ROOT, start_ray, write_chat_model

WARM_UP = 3
"""Steps that are not counted."""

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


def processor_s() -> float:
    """Return the processor time of this process and of all that Ray has started for it."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    times = [process.cpu_times() for process in processes if process.is_running()]
    return float(sum(each.user + each.system for each in times))


def run(model: Path, tag: dict[str, Any], steps: int) -> tuple[float, float, float]:
    """Return (median seconds a step, longest step, CPU milliseconds a trajectory) of one run."""
    start_ray()
    try:
        with tempfile.TemporaryDirectory() as folder:
            config = config_of(model, Path(folder), tag=tag, max_steps=steps, save_steps=10_000)
            pipeline = import_module("tests.roll_real.on_a_cpu").CpuPipeline(config)
            used: dict[int, float] = {}
            keep = pipeline.tracker.log

            def log(values: dict[str, Any], step: int) -> None:
                used[step] = processor_s()
                keep(values=values, step=step)

            pipeline.tracker.log = log
            pipeline.run()
            seconds = [line["time/step_total"] for line in pipeline.logged[WARM_UP:]]
            trajectories = (steps - WARM_UP) * BATCH
            spent = used[steps - 1] - used[WARM_UP - 1]
            return statistics.median(seconds), max(seconds), spent / trajectories * 1000
    finally:
        import_module("ray").shutdown()


def spread(values: list[float], digits: int) -> str:
    """Return the median of `values`, with minimum and maximum."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def main() -> None:
    """Measure, in turns, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=23)
    options = parser.parse_args()
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        model = write_chat_model(Path(folder))
        results: dict[str, list[tuple[float, float, float]]] = {name: [] for name in CONTESTANTS}
        for _ in range(options.repeats):
            for name, tag in CONTESTANTS.items():
                results[name].append(run(model, tag, options.steps))
                print(name, *results[name][-1], flush=True)  # noqa: T201 (a run takes minutes)
        print("| sampling | s a step | longest step, s | CPU ms a trajectory |\n|---|---|---|---|")  # noqa: T201
        for name, measured in results.items():
            step, longest, processor = (list(column) for column in zip(*measured, strict=True))
            print(f"| {name} | {spread(step, 2)} | {max(longest):.1f} | {spread(processor, 1)} |")  # noqa: T201


if __name__ == "__main__":
    main()
