"""A configuration names a taskset of verifiers, and the interpreter that has it; that of the trainer has none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.installation import interpreter
from tests.models_hf.chat_templates import QWEN, tokenizer_folder
from tests.models_hf.conftest import write_model

HARNESS = {"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}


@pytest.fixture
def run(tmp_path: Path) -> dict[str, Any]:
    """Return the values of a run of one step, whose samplers have verifiers and the taskset `summing`."""
    packages = Path(import_module("verifiers").__file__ or "").parents[1]
    tasksets = tmp_path / "tasksets"
    tasksets.mkdir()
    shutil.copy(Path(__file__).parent / "summing.py", tasksets)
    own = [each for each in sys.path if each and Path(each).resolve() != packages.resolve()]
    tokenizer_folder(tmp_path / "model", QWEN)
    write_model("qwen2", tmp_path / "model")
    return {
        "model": {"path": "model"},
        "data": {},
        "reward": {},
        "environment": {"verifiers": {"taskset": "summing", "config": HARNESS}, "max_length": 1500},
        "evaluation": {"environments": [{"verifiers": {"taskset": "summing", "config": HARNESS}}]},
        "algorithm": {"steps": 1, "prompts": 1, "group_size": 2, "max_lag": 0},
        "sampling": {"max_completion_tokens": 6},
        "placement": {"python": interpreter(tmp_path / "other", str(tasksets), str(packages), *own)},
    }


def penstock(folder: Path, values: dict[str, Any], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command with a configuration, with the packages of `.venv` alone."""
    (folder / "run.yaml").write_bytes(msgspec.yaml.encode(values))
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "penstock", *arguments, "run.yaml"]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)


def test_a_configured_run_samples_and_evaluates_a_taskset_in_another_interpreter(
    run: dict[str, Any], tmp_path: Path
) -> None:
    checked = penstock(tmp_path, run, "check")
    assert "one rollout with a made-up model: 1 calls in 1 sequences, reward 0" in checked.stdout, checked.stderr
    assert "one rollout of evaluation.summing with a made-up model" in checked.stdout

    ran = penstock(tmp_path, run, "run")

    assert ran.returncode == 0, ran.stderr
    lines = [msgspec.json.decode(line) for line in (tmp_path / "run/metrics.jsonl").read_bytes().splitlines()]
    assert [line["eval/summing/reward"] for line in lines if "eval/step" in line] == [0.0, 0.0]
    assert [line["env/turns"] for line in lines if "loss" in line] == [1.0]


@pytest.mark.parametrize(
    ("taskset", "message"),
    [("sums", "taskset 'sums' not found"), ("summing", "install")],
)
def test_what_the_interpreter_lacks_is_told_before_the_run(
    taskset: str, message: str, run: dict[str, Any], tmp_path: Path
) -> None:
    run["environment"]["verifiers"]["taskset"] = taskset
    if taskset == "summing":
        del run["placement"]["python"]

    checked = penstock(tmp_path, run, "check")

    assert checked.returncode
    assert message in checked.stderr
    assert "Traceback" not in checked.stderr
