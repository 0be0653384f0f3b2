"""Steps of SkyRL's trainers with its own generator and with a flow, on a CPU, and what a killed sampler costs; no test.

    OMP_NUM_THREADS=1 PYTHONPATH=src:. .venv/skyrl/bin/python -m tests.skyrl_real.beside_skyrl --repeats 3

All sample with the same engine, penstock's `TorchPolicy`, for vLLM does not run here: what is compared is what lies
around it. Where the engine has a process of its own, SkyRL's generator calls it by SkyRL's own HTTP client. Processor
time is that of all processes, the first two steps excluded. The killed process gets its SIGKILL 50 ms after SkyRL has
begun to generate in the middle of the training.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import torch
from benchmarks.machine import tree_cpu_seconds
from tests.skyrl_real import gym_env  # noqa: F401 (registers the environment)
from tests.skyrl_real.letters import write_model, write_prompts
from tests.skyrl_real.on_a_cpu import CPUDispatch
from tests.skyrl_real.own_engine import InProcess
from tests.skyrl_real.training import FULLY_ASYNC, config_of, experiment_of, trainer_of
from tests.worker_processes import worker_processes

STEPS, GROUPS, GROUP, WARM_UP = 22, 4, 8, 2
KILL_AFTER_S = 0.05
OPTIONS: dict[str, Any] = {
    "trainer.max_training_steps": STEPS,
    "trainer.epochs": 9,
    "generator.n_samples_per_prompt": GROUP,
    "generator.sampling_params.max_generate_length": 48,
}
EVENT = "MEASURED "


class Case(NamedTuple):
    flow: str = ""
    """The function in `letters` that makes the generator; SkyRL's own without."""
    apart: bool = False
    """Whether the engine has a process of its own."""
    kill: bool = False
    fully_async: bool = False


CASES = {
    "SkyRL's own, engine in the trainer's process": Case(),
    "SkyRL's own, engine in a process of its own": Case(apart=True),
    "a flow in the trainer's process": Case("generator"),
    "a flow in a process of its own": Case("in_one_process", apart=True),
    "SkyRL's own, engine killed": Case(apart=True, kill=True),
    "a flow, sampler killed": Case("in_one_process", apart=True, kill=True),
    "fully asynchronous, SkyRL's own, engine killed": Case(apart=True, kill=True, fully_async=True),
    "fully asynchronous, a flow, sampler killed": Case("in_one_process", apart=True, kill=True, fully_async=True),
}


class InPlace(CPUDispatch):
    """Copies the weights into the engine of the same process."""

    client: Any

    def init_weight_sync_state(self, inference_engine_client: Any) -> None:
        self.client = inference_engine_client

    async def save_weights_for_sampler(self) -> None:
        self.client.model.load_state_dict(self.model.state_dict())


class ByFile(InPlace):
    """Has the server load the weights from a file; pauses it meanwhile, as SkyRL's own dispatch does."""

    async def save_weights_for_sampler(self) -> None:
        await self.client.pause_generation()
        asked = {"path": self._written()}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.client.proxy_url}/load", json=asked) as sent,
        ):
            sent.raise_for_status()
        await self.client.resume_generation()

    def _written(self) -> str:
        path = Path(self.cfg.trainer.export_path).absolute() / "weights.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(self.model.state_dict(), path)
        return str(path)


@contextmanager
def served(folder: str) -> Iterator[subprocess.Popen[str]]:
    """Run the engine in a process of its own, which prints its port."""
    command = [sys.executable, "-m", "tests.skyrl_real.own_engine", folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def own_trainer(cfg: Any, server: subprocess.Popen[str] | None) -> Any:
    """Return SkyRL's trainer with SkyRL's own generator."""
    made = experiment_of(cfg, "")
    folder = cfg.trainer.policy.model.path
    if server is None:
        client: Any = InProcess(folder, made.tokenizer)
    else:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        remote = importlib.import_module("skyrl.backends.skyrl_train.inference_servers.remote_inference_client")
        client = remote.RemoteInferenceClient(url, [url], 1, model_name=folder, tokenizer=made.tokenizer)
    gym = importlib.import_module("skyrl.train.generators.skyrl_gym_generator")
    modules = importlib.import_module("skyrl.train.trainer"), importlib.import_module("skyrl.train.fully_async_trainer")
    maker = modules[1].FullyAsyncRayPPOTrainer if cfg.trainer.fully_async.enabled else modules[0].RayPPOTrainer
    trainer = maker(
        cfg=cfg,
        tracker=made.get_tracker(),
        tokenizer=made.tokenizer,
        train_dataset=made.train_dataset,
        inference_engine_client=client,
        generator=gym.SkyRLGymGenerator(cfg.generator, cfg.environment.skyrl_gym, client, made.tokenizer),
    )
    trainer.dispatch = InPlace(cfg) if server is None else ByFile(cfg)
    return trainer


def tell(**found: Any) -> None:
    """Print an event at once: SkyRL may end this process without another word."""
    print(EVENT + json.dumps(found | {"at": time.monotonic()}), flush=True)  # noqa: T201 (read by `measure`)


def run(case: Case, folder: Path) -> None:
    """Train in this process, and print what happens."""
    torch.set_num_threads(1)
    model, data = write_model(folder / "model", width=128, layers=4), write_prompts(folder / "prompts.jsonl")
    cfg = config_of(model, data, folder, **OPTIONS, **(FULLY_ASYNC if case.fully_async else {}))
    with ExitStack() as stack:
        server = stack.enter_context(served(str(model))) if case.apart and not case.flow else None
        named = f"tests.skyrl_real.letters:{case.flow}"
        trainer = trainer_of(cfg, named) if case.flow else own_trainer(cfg, server)
        if case.kill:
            trainer.generator.generate = killing(trainer, server)
        trainer.dispatch.at_step = lambda number: tell(step=number, processor_s=tree_cpu_seconds())
        trainer.tracker.log = lambda *_, **__: None
        try:
            asyncio.run(trainer.train())
        except Exception as error:  # noqa: BLE001 (what SkyRL raises is what is measured)
            tell(error=type(error).__name__)
    if case.flow:
        lost = trainer.generator.report.balance.reasons["lost"]
        tell(lost=sum(number for reason, number in lost.items() if "killed" in reason))


def killing(trainer: Any, server: subprocess.Popen[str] | None) -> Callable[..., Any]:
    """Return the generator's `generate`, which kills the server or the flow's sampler in the middle of the training."""
    generate, pending = trainer.generator.generate, [True]

    def kill(process: int) -> None:
        tell(killed=process)
        os.kill(process, signal.SIGKILL)

    async def generated(*args: Any, **kwargs: Any) -> Any:
        if len(trainer.dispatch.losses) == STEPS // 2 and pending:
            pending.clear()
            asyncio.get_running_loop().call_later(
                KILL_AFTER_S, kill, worker_processes()[0] if server is None else server.pid
            )
        return await generate(*args, **kwargs)

    return generated


class Measured(NamedTuple):
    """One run."""

    step_s: float
    """Median over all steps but the first two."""
    cpu_ms: float
    """Processor time of a trajectory, over the same steps, in milliseconds."""
    longest_s: float
    """The longest of these steps."""
    trained: int
    lost: int | None
    """Trajectories that the flow counted as lost with the killed process; None: SkyRL's own counts none."""
    end: str


def measure(name: str) -> Measured:
    """Measure a case in a process of its own."""
    command = [sys.executable, "-m", "tests.skyrl_real.beside_skyrl", "--case", name]
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    ended = time.monotonic()
    events = [json.loads(line.removeprefix(EVENT)) for line in ran.stdout.splitlines() if line.startswith(EVENT)]
    steps = [each for each in events if "step" in each][WARM_UP - 1 :]
    found = {key: value for each in events for key, value in each.items()}
    took = [later["at"] - earlier["at"] for earlier, later in pairwise(steps)]
    spent = steps[-1]["processor_s"] - steps[0]["processor_s"]
    end = found.get("error", "") or ("" if ran.returncode == 0 else f"exit code {ran.returncode}")
    killed = [each["at"] for each in events if "killed" in each]
    return Measured(
        statistics.median(took),
        1000 * spent / (len(took) * GROUPS * GROUP),
        max(took),
        found["step"] * GROUPS * GROUP,
        found.get("lost"),
        f"{end} {ended - killed[0]:.0f} s after the signal" if end and killed else end or "done",
    )


def spread(values: Sequence[float], digits: int) -> str:
    """Return the median of `values`, with minimum and maximum where they differ."""
    least, most = (f"{found(values):.{digits}f}" for found in (min, max))
    return f"{statistics.median(values):.{digits}f}" + ("" if least == most else f" ({least}–{most})")


def main() -> None:
    """Measure all cases in turn, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--case", choices=CASES, help="run this one alone, in this process")
    options = parser.parse_args()
    if options.case is not None:
        with tempfile.TemporaryDirectory() as folder:
            run(CASES[options.case], Path(folder))
        return
    results: dict[str, list[Measured]] = {name: [] for name in CASES}
    for _ in range(options.repeats):
        for name, measured in results.items():  # alternating, so that a busy machine slows all of them
            measured.append(measure(name))
            print(name, *measured[-1], flush=True)  # noqa: T201 (a run takes half a minute)
    print("| sampling | s a step | CPU ms a trajectory | longest step, s | trained | lost | end |")  # noqa: T201
    print("|---|---|---|---|---|---|---|")  # noqa: T201
    for name, measured in results.items():
        step, cpu, longest, trained, lost, end = zip(*measured, strict=True)
        counted = "–" if None in lost else spread(lost, 0)
        numbers = [spread(step, 2), spread(cpu, 1), f"{max(longest):.1f}", spread(trained, 0), counted]
        print(f"| {name} | {' | '.join(numbers)} | {'; '.join(sorted(set(end)))} |")  # noqa: T201


if __name__ == "__main__":
    main()
