"""Steps of SkyRL's synchronous trainer with its own generator and with a flow, on a CPU; no test.

    OMP_NUM_THREADS=1 PYTHONPATH=src:. .venv/skyrl/bin/python -m tests.skyrl_real.beside_skyrl --repeats 3

Both sample with the same engine, penstock's `TorchPolicy`, for vLLM does not run here: what is compared is what lies
around it. The last case is the fully asynchronous trainer with SkyRL's own generator, whose engine fails in the third
step.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.skyrl_real import gym_env  # noqa: F401 (registers the environment)
from tests.skyrl_real.conftest import samplers
from tests.skyrl_real.letters import write_model, write_prompts
from tests.skyrl_real.on_a_cpu import CPUDispatch
from tests.skyrl_real.training import FULLY_ASYNC, config_of, experiment_of, trainer_of

from penstock import Worker
from penstock._stages.integrations.skyrl.sampling_params import sampling_of
from penstock.models import HFModel
from penstock.torch import TorchPolicy

STEPS, GROUPS, GROUP = 12, 4, 8
OPTIONS: dict[str, Any] = {
    "trainer.max_training_steps": STEPS,
    "trainer.epochs": 9,
    "generator.n_samples_per_prompt": GROUP,
    "generator.sampling_params.max_generate_length": 48,
}
CASES = {"own": "", "here": "generator", "process": "in_one_process", "killed": "in_one_process"}


class Engine:
    """In the place of SkyRL's inference client: penstock's engine in this process, with the trainer's weights."""

    def __init__(self, folder: str, tokenizer: Any, fails_after: int | None = None) -> None:
        self.model = HFModel.from_pretrained(folder)
        self._tokenizer = tokenizer
        self._left = fails_after
        self._stack = AsyncExitStack()
        self._engine: Any = None

    async def generate(self, input_batch: Mapping[str, Any], model: str | None = None) -> dict[str, Any]:  # noqa: ARG002
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise ConnectionError("the engine has died")
        if self._engine is None:
            policy = TorchPolicy(lambda: self.model, eos_id=0)
            self._engine = await self._stack.enter_async_context(policy.open(Worker()))
        (prompt,) = input_batch["prompt_token_ids"]
        (found,) = await self._engine.generate(
            [np.array(prompt, np.int32)], sampling_of(input_batch["sampling_params"])
        )
        return {
            "responses": [self._tokenizer.decode(found.tokens, skip_special_tokens=True)],
            "response_ids": [found.tokens.tolist()],
            "stop_reasons": [found.stop_reason.name.lower()],
            "response_logprobs": [found.logprobs.tolist()],
        }

    async def finish_session(self, session_id: str) -> None:
        """Do nothing."""

    async def aclose(self) -> None:
        await self._stack.aclose()


class InPlace(CPUDispatch):
    """Copies the weights into the engine of the same process."""

    engine: Engine

    def init_weight_sync_state(self, inference_engine_client: Any) -> None:
        self.engine = inference_engine_client

    async def save_weights_for_sampler(self) -> None:
        self.engine.model.load_state_dict(self.model.state_dict())


def own_trainer(cfg: Any, *, fails_after: int | None = None) -> Any:
    """Return SkyRL's trainer with SkyRL's own generator."""
    made = experiment_of(cfg, "")
    client = Engine(cfg.trainer.policy.model.path, made.tokenizer, fails_after)
    gym = importlib.import_module("skyrl.train.generators.skyrl_gym_generator")
    modules = importlib.import_module("skyrl.train.trainer"), importlib.import_module("skyrl.train.fully_async_trainer")
    maker = modules[1].FullyAsyncRayPPOTrainer if cfg.trainer.fully_async.enabled else modules[0].RayPPOTrainer
    generator = gym.SkyRLGymGenerator(cfg.generator, cfg.environment.skyrl_gym, client, made.tokenizer)
    trainer = maker(
        cfg=cfg,
        tracker=made.get_tracker(),
        tokenizer=made.tokenizer,
        train_dataset=made.train_dataset,
        inference_engine_client=client,
        generator=generator,
    )
    trainer.dispatch = InPlace(cfg)
    return trainer


def processor_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def run(case: str, folder: Path) -> None:
    """Run a case in this process, and print its numbers."""
    torch.set_num_threads(1)
    model, data = write_model(folder / "model", width=128, layers=4), write_prompts(folder / "prompts.jsonl")
    if case == "own_fails":
        trainer = own_trainer(
            config_of(model, data, folder, **OPTIONS, **FULLY_ASYNC), fails_after=2 * GROUPS * GROUP + 9
        )
    else:
        cfg = config_of(model, data, folder, **OPTIONS)
        trainer = trainer_of(cfg, f"tests.skyrl_real.letters:{CASES[case]}") if CASES[case] else own_trainer(cfg)
    ends: list[float] = []
    middle = threading.Event()

    def step(number: int) -> None:
        ends.append(time.monotonic())
        if number == STEPS // 2:
            middle.set()

    def kill() -> None:
        if middle.wait(600) and case == "killed":
            os.kill(samplers()[0], signal.SIGKILL)

    trainer.dispatch.at_step = step
    trainer.tracker.log = lambda *_, **__: None
    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    used = processor_s()
    asyncio.run(trainer.train())
    seconds = np.diff(ends)
    per_trajectory_ms = 1000 * (processor_s() - used) / (STEPS * GROUPS * GROUP)
    ended = trainer.generator.report.balance.ended if hasattr(trainer.generator, "report") else {}
    numbers = [seconds.mean(), per_trajectory_ms, seconds.max(), ended.get("trained", len(ends) * GROUPS * GROUP)]
    sys.stdout.write(" ".join(map(str, ["NUMBERS", *numbers, ended.get("lost", 0)])) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run every case in a process of its own, and print medians with minimum and maximum."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--case", default="")
    arguments = parser.parse_args()
    if arguments.case:
        with tempfile.TemporaryDirectory() as folder:
            run(arguments.case, Path(folder))
        return
    for case in (*CASES, "own_fails"):
        found = []
        for _ in range(arguments.repeats):
            command = [sys.executable, "-m", __spec__.name, "--case", case]
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
            lines = [line for line in ran.stdout.splitlines() if line.startswith("NUMBERS")]
            if not lines:
                sys.stdout.write(f"{case}: exit code {ran.returncode}, without a result\n")
                continue
            found.append([float(each) for each in lines[0].split()[1:]])
        for name, values in zip(
            ("s a step", "CPU ms", "longest s", "trained", "lost"), zip(*found, strict=True), strict=False
        ):
            spread = f"{statistics.median(values):8.3f} ({min(values):.3f} to {max(values):.3f})"
            sys.stdout.write(f"{case:8} {name:10} {spread}\n")


if __name__ == "__main__":
    main()
