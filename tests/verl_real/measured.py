"""Measure verl's synchronous trainer with its own agent loop and with a flow: seconds a step, processor time, losses.

PYTHONPATH=.:src:.venv/verl python -m tests.verl_real.measured {steps,killed,writing}, after `make test-verl`. Both
sample prompts of 3 letters with the same engine and weights, and are trained by the same code: see `served` and
`training`. Processor time is that of the trainer and of all its processes, those of Ray too, the first steps excluded.
`killed`: a process that samples is killed in step `KILL_AT`, with rollouts in flight. `writing`: both write finished
groups to TransferQueue.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from benchmarks.machine import tree_cpu_seconds
from tests.roll_real.conftest import write_chat_model
from tests.verl_real.asking import outputs_of, worker_of
from tests.verl_real.conftest import process_group, running_transfer_queue, training_of, with_paths
from tests.verl_real.framework import agent_loop_tq, tq
from tests.verl_real.training import Logged, train

from penstock import TrajectoryGroup
from penstock._stages.integrations.verl.rows import Needs, rows_of
from penstock._stages.integrations.verl.transfer_queue import TransferQueue

WARM_UP = 3
"""Steps that are not counted."""

KILL_AT = 20

PATIENCE_S = 60
"""Seconds without a step after which a training counts as hung."""

BATCH = 16
"""Trajectories of a step."""

Run = Callable[[Path, Path, list[str]], dict[str, Any]]
"""Trains with the model, in the folder, with these lines of the configuration; returns what its ledger says."""


class Clock(Logged):
    """Tracking that notes the time and the processor time at the end of each step, and ends a training that hangs."""

    ends: ClassVar[list[tuple[float, float]]] = []

    def log(self, data: dict[str, Any], step: int) -> None:
        super().log(data, step)
        self.ends.append((time.perf_counter(), tree_cpu_seconds()))
        signal.alarm(PATIENCE_S)


def hung(*_: Any) -> None:
    """End the training, in the place of a person who would."""
    raise TimeoutError(f"no step in {PATIENCE_S} s")


def killing(trainer_class: Any, victim: Callable[[Any], int]) -> Any:
    """Return a trainer that kills this process when step `KILL_AT` has asked for its groups."""

    class Killing(trainer_class):  # type: ignore[misc]  # of an untyped package
        def prepare_step(self) -> Any:
            found = [victim(self)] if self.global_steps == KILL_AT else []
            prepared = super().prepare_step()
            for pid in found:
                os.kill(pid, signal.SIGKILL)
            return prepared

    return Killing


def with_own_loop(model: Path, folder: Path, lines: list[str], *, victim: str | None = None) -> dict[str, Any]:
    """Train with verl's own agent loop; kill its `worker` or its `server`."""
    served = import_module("tests.verl_real.served")
    victims = {
        "worker": lambda trainer: served.process_of(trainer.agent_loop_manager.agent_loop_workers[0]),
        "server": lambda trainer: served.process_of(trainer.llm_server_manager.server_handles[0]),
    }
    trainer = served.OwnTrainer if victim is None else killing(served.OwnTrainer, victims[victim])
    train(training_of(model, folder, *lines, *served.OWN_LOOP), trainer, Clock)
    return {}


def with_flow(model: Path, folder: Path, lines: list[str], *, workers: int = 1, dies: bool = False) -> dict[str, Any]:
    """Train with a flow that samples in the process of the trainer, or in one of its own, which may be killed."""
    custom = "+actor_rollout_ref.rollout.custom"
    options = f"{custom}.options={{max_lag: 0, workers: {workers}}}"
    flow = f"tests.verl_real.flows:{'deadly' if dies else 'letters'}"
    lines = [*lines, options, f"{custom}.dies_at={KILL_AT * BATCH - 8}"]
    _, manager, _ = train(training_of(model, folder, *lines, flow=flow), tracking=Clock)
    balance = manager.report.balance
    return {"balanced": balance.balanced, "trained": balance.ended["trained"], "lost": dict(balance.reasons["lost"])}


CONTESTANTS: dict[str, Run] = {
    "verl's own agent loop": with_own_loop,
    "a flow in the trainer's process": partial(with_flow, workers=0),
    "a flow in a process of its own": with_flow,
}

KILLED: dict[str, Run] = {
    "verl's agent loop worker, killed": partial(with_own_loop, victim="worker"),
    "verl's server, killed": partial(with_own_loop, victim="server"),
    "the process of a flow, killed": partial(with_flow, dies=True),
}


@contextmanager
def started() -> Iterator[Path]:
    """Run what verl needs; yield a folder."""
    os.environ.update(with_paths())  # for Ray's processes
    with tempfile.TemporaryDirectory() as folder, running_transfer_queue(), process_group(Path(folder)):
        yield Path(folder)


def run(name: str, steps: int) -> dict[str, Any]:
    """Train in this process; return when the steps ended, how the training did, and what the ledger says."""
    signal.signal(signal.SIGALRM, hung)
    lines = [f"trainer.total_training_steps={steps}", f"trainer.total_epochs={steps}"]
    with started() as folder:
        (folder / "model").mkdir()
        model = write_chat_model(folder / "model")
        found: dict[str, Any] = {"ended": "trained to the end"}
        try:
            found |= (CONTESTANTS | KILLED)[name](model, folder, lines)
        except Exception as error:  # noqa: BLE001 (the result of a contest)
            found["ended"] = f"{type(error).__name__}: {error}"
        signal.alarm(0)
    return found | {"ends": Clock.ends}


def run_apart(name: str, steps: int) -> dict[str, Any]:
    """Return the same, of a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, "-m", "tests.verl_real.measured", "--steps", str(steps), "--contestant", name]
        with Path(folder, "errors.txt").open("wb") as errors:
            subprocess.run([*command, "--result", result], stderr=errors, stdout=errors, check=True)
        found: dict[str, Any] = json.loads(result.read_text())
    return found


def step_of(found: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return (median seconds a step, longest step, CPU milliseconds a trajectory)."""
    ends = found["ends"][WARM_UP - 1 :]
    took = [after[0] - before[0] for before, after in pairwise(ends)]
    return statistics.median(took), max(took), 1000 * (ends[-1][1] - ends[0][1]) / (len(took) * BATCH)


def measure_writing(groups: int = 40) -> dict[str, list[tuple[float, float, float]]]:
    """Return the milliseconds a trajectory in which each writes: of a clock, of its processor time, and of all."""
    draw = np.random.default_rng(0)
    size, prompt, response = 8, 128, 512
    given = [
        TrajectoryGroup.build(
            env="given",
            instance_id=str(number),
            sequences=[draw.integers(0, 1000, prompt + response) for _ in range(size)],
            loss_mask=[[0] * prompt + [1] * response] * size,
            behavior_logprobs=[np.r_[np.zeros(prompt), -draw.random(response)] for _ in range(size)],
            rewards=draw.random(size),
        )
        for number in range(groups)
    ]
    outputs = [outputs_of(group) for group in given]
    worker = worker_of(agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class)

    async def theirs(tag: str) -> None:
        for number, rollouts in enumerate(outputs):
            uid = f"{tag}{number}"
            named = {"validate": False, "uid": uid, "global_steps": 1}
            written = (worker._agent_loop_postprocess(each, session_id=i, **named) for i, each in enumerate(rollouts))
            await asyncio.gather(*written)
            await tq.async_kv_put(key=uid, partition_id="train", tag={"status": "finished"})

    def ours(tag: str) -> None:
        for number, group in enumerate(given):
            queue.put(f"{tag}{number}", 1, rows_of(group, Needs()), name_rows=False)
            queue.finish(f"{tag}{number}", 1)

    queue = TransferQueue()
    writers = {"verl's agent loop worker": lambda tag: asyncio.run(theirs(tag)), "a flow's manager": ours}
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in writers}
    for number in range(4):  # the first is not counted
        for name, write in writers.items():
            before = time.perf_counter(), time.process_time(), tree_cpu_seconds()
            write(f"{name}-{number}-")
            after = time.perf_counter(), time.process_time(), tree_cpu_seconds()
            tq.kv_clear(keys=list(tq.kv_list("train")["train"]), partition_id="train")
            took = [1000 * (b - a) / (groups * size) for a, b in zip(before, after, strict=True)]
            found[name].append((took[0], took[1], took[2]))
    return {name: values[1:] for name, values in found.items()}


def spread(values: list[float], digits: int) -> str:
    """Return the median of `values`, with minimum and maximum."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def show_steps(repeats: int, steps: int) -> None:
    """Measure, in turns, and print a table."""
    results: dict[str, list[tuple[float, float, float]]] = {name: [] for name in CONTESTANTS}
    for _ in range(repeats):
        for name in CONTESTANTS:
            results[name].append(step_of(run_apart(name, steps)))
            print(name, *results[name][-1], flush=True)  # noqa: T201 (a run takes a minute)
    print("| sampling | s a step | CPU ms a trajectory | longest step, s |\n|---|---|---|---|")  # noqa: T201
    for name, measured in results.items():
        step, longest, processor = (list(column) for column in zip(*measured, strict=True))
        print(f"| {name} | {spread(step, 2)} | {spread(processor, 1)} | {max(longest):.1f} |")  # noqa: T201


def show_killed(repeats: int, steps: int) -> None:
    """Kill each, and print what became of the training."""
    for _ in range(repeats):
        for name in KILLED:
            found = run_apart(name, steps)
            ends = [end for end, _ in found.pop("ends")]
            longest = max((after - before for before, after in pairwise(ends)), default=0.0)
            print(f"{name}: {len(ends)} steps, longest {longest:.1f} s, {found}", flush=True)  # noqa: T201


def show_writing() -> None:
    """Measure the writing, and print a table."""
    with started():
        found = measure_writing()
    print("| writing | ms a trajectory | CPU ms of the writer | of all processes |\n|---|---|---|---|")  # noqa: T201
    for name, measured in found.items():
        print(f"| {name} | {' | '.join(spread(list(each), 2) for each in zip(*measured, strict=True))} |")  # noqa: T201


def main() -> None:
    """Measure one part."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=["steps", "killed", "writing"], nargs="?")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=43)
    parser.add_argument("--contestant", choices=CONTESTANTS | KILLED, help="run this one alone, in this process")
    parser.add_argument("--result", type=Path, help="the file for what it finds")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    if options.contestant is not None:
        options.result.write_text(json.dumps(run(options.contestant, options.steps)))
        return
    match options.part:
        case "steps":
            show_steps(options.repeats, options.steps)
        case "killed":
            show_killed(options.repeats, options.steps)
        case "writing":
            show_writing()


if __name__ == "__main__":
    main()
