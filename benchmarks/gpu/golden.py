"""The golden run: `penstock init --tiny` and `penstock run`, as a user types them, on the device."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .cases import Load
from .devices import Device
from .parts import Skipped

__all__ = ["measure_golden_run"]

LAST = 5
"""Steps whose mean reward is the end of the curve."""


def measure_golden_run(load: Load, device: Device, timeout_s: float) -> dict[str, Any]:
    """Return the rewards of a run of the task of `penstock init --tiny`, the mean of the last ones, and its seconds.

    Raises:
        Skipped: it took longer than `timeout_s`.
        RuntimeError: it failed; the message has what it said last.
    """
    with TemporaryDirectory() as made:
        folder = Path(made) / "task"
        _penstock(["init", "--tiny", str(folder)], Path(made), timeout_s)
        placed = f"placement.device={device.torch}"
        began = time.perf_counter()
        _penstock(["run", "config.yaml", placed, f"algorithm.steps={load.golden_steps}"], folder, timeout_s)
        took = time.perf_counter() - began
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward"] for line in lines if "reward" in line]
    return {"run_s": took, "steps": load.golden_steps, "reward": statistics.mean(rewards[-LAST:]), "rewards": rewards}


def _penstock(arguments: list[str], folder: Path, timeout_s: float) -> None:
    command = [sys.executable, "-m", "penstock", *arguments]
    try:
        ended = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True, timeout=timeout_s)  # noqa: S603 (penstock itself)
    except subprocess.TimeoutExpired:
        raise Skipped("time") from None
    if ended.returncode:
        raise RuntimeError(f"penstock {arguments[0]}: {(ended.stderr.strip() or ended.stdout).splitlines()[-1]}")
