"""TRL's GRPOTrainer with its own generation, and with that of a flow: seconds a step, processor a trajectory, losses.

    PYTHONPATH=.venv/trl python -m benchmarks.plugged_in [--repeats 3]

The trainer, the model, the prompts' lengths and the reward are the same; completions have full length, because a random
model hardly ever ends them. Processor time is that of the trainer and of all its processes. In the last contest the
process that samples is killed in the middle. TRL's asynchronous worker needs a vLLM server, and is not among these.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from rich.console import Console

from penstock import RewardBridge, SourceEnv, here, processes, source
from penstock.data import PromptDataset
from penstock.integrations.trl import flow_reward, rollout_func
from penstock.models import HFModel
from penstock.policies import PretrainedTokenizer, SamplingParams
from penstock.rewards import trl_reward
from penstock.torch import TorchPolicy
from penstock.weights import WeightPublisher

from .machine import tree_cpu_seconds
from .report import command_line, count, median_of, print_table, write_json
from .trainers import GROUP, Size, make_files, reward, sampled_model

__all__ = ["main"]

SIZE = Size(vocabulary=8192, width=128, layers=4, prompts=4, prompt_tokens=32, completion=48, steps=12, threads=1)


class Measured(NamedTuple):
    """One contest."""

    step_s: float
    """Median over all steps but the first two."""
    cpu_ms: float
    """Processor time of a trajectory, over the same steps, in milliseconds."""
    longest_s: float
    """The longest of these steps."""
    trained: int
    lost: int
    """Trajectories that were lost with a sampler."""


def kill_sampler() -> None:
    """Kill the process that samples."""
    next(child for child in psutil.Process().children() if "resource_tracker" not in " ".join(child.cmdline())).kill()


def train(folder: Path, rows: list[dict[str, str]], size: Size, *, kill: bool = False, **options: Any) -> Measured:
    """Train with TRL's GRPOTrainer."""
    import datasets  # noqa: PLC0415 (takes seconds)
    import transformers  # noqa: PLC0415 (as above)

    trl: Any = importlib.import_module("trl")
    ends: list[tuple[float, float]] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
            ends.append((time.perf_counter(), tree_cpu_seconds()))
            if kill and state.global_step == size.steps // 2:
                kill_sampler()

    trainer = trl.GRPOTrainer(
        model=str(folder),
        args=trl.GRPOConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=GROUP,
            gradient_accumulation_steps=size.prompts,
            num_generations=GROUP,
            max_completion_length=size.completion,
            max_steps=size.steps,
            learning_rate=1e-5,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.PreTrainedTokenizerFast.from_pretrained(folder),
        callbacks=[*options.pop("callbacks", []), Clock()],
        **options,
    )
    trainer.train()
    took = [b[0] - a[0] for a, b in pairwise(ends[1:])]
    trained = size.prompts * GROUP
    cpu_ms = 1000 * (ends[-1][1] - ends[1][1]) / (len(took) * trained)
    return Measured(statistics.median(took), cpu_ms, max(took), trained * size.steps, 0)


def train_plugged_in(
    folder: Path, rows: list[dict[str, str]], size: Size, *, samplers: int, kill: bool = False
) -> Measured:
    """Train with the same trainer, whose rollouts are those of a flow."""
    tokenizer = PretrainedTokenizer(folder)
    publisher = WeightPublisher(HFModel.empty(folder).state_dict())

    def flow() -> Any:
        policy = TorchPolicy(
            partial(sampled_model, folder, size.threads), eos_id=tokenizer.eos_id, weights=publisher.url
        )
        env = SourceEnv(
            PromptDataset(rows),
            policy,
            tokenizer,
            group_size=GROUP,
            sampling=SamplingParams(max_completion_tokens=size.completion),
            concurrency=size.prompts * GROUP,
        )
        on = processes(samplers, restarts=1) if samplers else here()
        return source(env, on=on, max_lag=0).then(RewardBridge(functions=[trl_reward(reward)]))

    with rollout_func(flow, publisher) as rollouts:
        plugs: dict[str, Any] = {"rollout_func": rollouts, "callbacks": [rollouts.callback()]}
        measured = train(folder, rows, size, kill=kill, reward_funcs=flow_reward, **plugs)
    assert rollouts.report is not None  # noqa: S101 (the flow has run)
    ended, reasons = rollouts.report.balance.ended, rollouts.report.balance.reasons["lost"]
    lost = sum(number for reason, number in reasons.items() if "killed" in reason)
    return measured._replace(trained=ended["trained"], lost=lost)


CONTESTANTS: dict[str, Callable[[Path, list[dict[str, str]], Size], Measured]] = {
    "TRL's generation": partial(train, reward_funcs=reward),
    "a flow, in the process": partial(train_plugged_in, samplers=0),
    "a flow, 1 sampler": partial(train_plugged_in, samplers=1),
    "a flow, sampler killed": partial(train_plugged_in, samplers=1, kill=True),
}


def in_a_process(name: str, size: Size) -> Measured:
    """Measure a contestant in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.plugged_in", "--one", name, json.dumps(size)]
    environment = os.environ | {"OMP_NUM_THREADS": str(size.threads), "HF_HUB_OFFLINE": "1"}
    environment["TRL_EXPERIMENTAL_SILENCE"] = "1"
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)  # noqa: S603 (this module itself)
    return Measured(*json.loads(ended.stdout.splitlines()[-1]))


def measure_here(name: str, size: Size) -> Measured:
    """Measure a contestant in this process."""
    import torch  # noqa: PLC0415 (the parent of the contestants needs none)

    torch.set_num_threads(size.threads)
    with tempfile.TemporaryDirectory() as made:
        return CONTESTANTS[name](Path(made), make_files(Path(made), size), size)


def show(found: Mapping[str, list[Measured]], console: Console) -> None:
    """Print the medians."""
    rows = [
        [name, *(median_of(values, digits) for values, digits in zip(zip(*all_of, strict=True), DIGITS, strict=True))]
        for name, all_of in found.items()
    ]
    print_table(console, "GRPOTrainer", ("", "s a step", "CPU ms each", "longest s", "trained", "lost"), rows)


DIGITS = (2, 1, 1, 0, 0)
"""Of the numbers of `Measured`, as printed."""


def main() -> None:
    """Measure all contestants in turn."""
    parser = command_line(__doc__, seconds=None, repeats=3)
    parser.add_argument("--steps", type=count, default=SIZE.steps, help="steps of each measurement")
    parser.add_argument("--one", nargs=2, help="measure one contestant in this process: its name, and the size")
    options = parser.parse_args()
    if options.one is not None:
        name, size = options.one
        print(json.dumps(measure_here(name, Size(*json.loads(size)))))
        return
    if importlib.util.find_spec("trl") is None:
        parser.error("TRL is not installed: make test-trl, then PYTHONPATH=.venv/trl, or pip install 'penstock[trl]'")
    found: dict[str, list[Measured]] = {name: [] for name in CONTESTANTS}
    for _ in range(options.repeats):
        for name, measured in found.items():  # alternating, so that a busy machine slows all of them
            measured.append(in_a_process(name, SIZE._replace(steps=options.steps)))
    show(found, Console(width=120))
    write_json(options.json, {"size": SIZE._asdict(), "found": found})


if __name__ == "__main__":
    main()
