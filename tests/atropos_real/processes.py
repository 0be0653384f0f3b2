"""Processes of Atropos: started with what makes them do without a network, and ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
from tests.failsafe import FAILSAFE_S

__all__ = ["PYTHON", "ROOT", "Environment", "ended", "offline", "run", "serve", "started"]

ROOT = Path(__file__).parent.parent.parent

PYTHON = os.environ.get("ATROPOS_PYTHON", sys.executable)
"""The interpreter that has Atropos."""

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "disabled",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


def started(*command: str, cwd: Path, log: Path, path: Path | None = None) -> subprocess.Popen[str]:
    """Start `python *command` with its standard error in `log`; the caller reads its standard output."""
    with log.open("a") as written:
        return subprocess.Popen(
            [PYTHON, *command], cwd=cwd, env=offline(path), stdout=subprocess.PIPE, stderr=written, text=True
        )


def ended(process: subprocess.Popen[str], signalled: signal.Signals = signal.SIGTERM) -> int:
    """End it, and return its status."""
    if process.poll() is None:
        process.send_signal(signalled)
    try:
        process.communicate(timeout=FAILSAFE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
    return process.returncode


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """One that runs `serve`, and what it says of itself."""

    process: subprocess.Popen[bytes]
    log: Path
    """The file of its output."""
    groups: Path
    """The groups that it went to send, a line of JSON each: `data_path_to_save_groups`."""

    async def exit(self) -> int:
        """Return its status, when it has ended by itself."""
        descriptor = os.pidfd_open(self.process.pid)
        try:
            await anyio.wait_readable(descriptor)
        finally:
            os.close(descriptor)
        return self.process.wait()

    def stop(self) -> None:
        """Have it end, if it has not: by Ctrl-C, on which it writes the last groups."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(timeout=FAILSAFE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def sent(self) -> list[dict[str, Any]]:
        """Return the groups that it went to send."""
        return [json.loads(line) for line in self.groups.read_text().splitlines()]


def serve(
    script: Path,
    gateway: str,
    model: str,
    workspace: Path,
    *options: str,
    folder: Path,
    path: Path | None = None,
    server_type: str = "vllm",
) -> Environment:
    """Start `python <script> serve` as its README has it, with this gateway and this model server."""
    said = {
        "env.rollout_server_url": gateway,
        "env.tokenizer_name": workspace / "tokenizer",
        "env.group_size": 4,
        "env.max_num_workers": 4,
        "env.steps_per_eval": 0,
        "env.use_wandb": "false",
        "env.data_path_to_save_groups": folder / "groups.jsonl",
        "config": folder / "servers.yaml",
        "slurm": "false",
    }
    # Two of them: an environment whose `config_init` names one server asks at localhost:9004 in any case.
    server = {"base_url": f"{model}/v1", "model_name": str(workspace / "tokenizer"), "server_type": server_type}
    (folder / "servers.yaml").write_text(json.dumps({"openai": [server | {"api_key": "none"}] * 2}))
    flags = [part for name, value in said.items() for part in (f"--{name}", str(value))]
    return run([str(script), "serve", *flags, *options], cwd=workspace, folder=folder, path=path)


def run(command: Sequence[str], *, cwd: Path, folder: Path, path: Path | None = None) -> Environment:
    """Start `python *command`; modules are looked for in `path` first."""
    log = folder / "environment.log"
    with log.open("w") as written:
        process = subprocess.Popen(
            [PYTHON, *command], cwd=cwd, env=offline(path), stdout=written, stderr=subprocess.STDOUT
        )
    return Environment(process=process, log=log, groups=folder / "groups.jsonl")


def offline(path: Path | None = None) -> dict[str, str]:
    """Return the environment of a process that is to ask no hub, and finds modules in `path` first."""
    folders = [str(folder) for folder in (path, ROOT / "src", ROOT) if folder is not None]
    return os.environ | OFFLINE | {"PYTHONPATH": os.pathsep.join(folders)}
