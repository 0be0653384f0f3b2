"""ROLL's pipeline in a process of its own, and what it has logged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

FLOW = {"env_manager_cls": "penstock.integrations.roll.FlowEnvManager"}

PIPELINE_S = 1200.0
"""Bound on a run of ROLL's pipeline."""


def pipeline_of(model: Path, output: Path, *, cwd: Path | None = None, **options: Any) -> subprocess.Popen[bytes]:
    """Start ROLL's pipeline in a process of its own, in the folder `cwd`."""
    arguments = json.dumps({"model": str(model), "output": str(output), **options})
    with (output / "errors.txt").open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.roll_real.piped", arguments], cwd=cwd or output, stderr=errors
        )


def errors_of(output: Path) -> str:
    """Return the end of what a pipeline wrote to its standard error."""
    return (output / "errors.txt").read_text()[-4000:]


def logged(output: Path) -> list[dict[str, Any]]:
    """Return what a pipeline has logged so far, a value for each step."""
    path = output / "logged.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def run_pipeline(model: Path, output: Path, **options: Any) -> list[dict[str, Any]]:
    """Run ROLL's pipeline to its end, and return what it logged."""
    process = pipeline_of(model, output, **options)
    assert process.wait(PIPELINE_S) == 0, errors_of(output)
    return logged(output)
