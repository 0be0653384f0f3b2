"""Signals to `penstock run` before its first step and after its last one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from tests import configured_run
from tests.models_hf.waiting_functions import APART, MOMENT
from tests.processes.test_stop_signals import STOPPING, read_until

COMMAND = [sys.executable, "-c", "from penstock._cli import main; main()", "run"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A run whose functions wait, with an evaluation before and after training."""
    path = configured_run.write_run(tmp_path, {"samplers": 1})
    values = yaml.safe_load(path.read_text())
    values["data"]["evaluation"] = APART
    values["prepare"] = "tests.models_hf.waiting_functions:prepare"
    values["reward"]["functions"] = [{"function": "tests.models_hf.waiting_functions:letters_e"}]
    path.write_text(yaml.safe_dump(values))
    return path


def stopped(config: Path, moment: str, number: signal.Signals) -> tuple[int, str]:
    """Send the signal to a run at the moment; return its status and what it printed to stderr from then on."""
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path), MOMENT: moment}
    with subprocess.Popen(
        [*COMMAND, str(config)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=config.parent,
    ) as run:
        read_until(run.stdout, moment)
        run.send_signal(number)
        read_until(run.stderr, STOPPING)
        assert run.stdin is not None
        assert run.stderr is not None
        with suppress(BrokenPipeError):
            run.stdin.write("\n")
            run.stdin.flush()
        errors = run.stderr.read()  # communicate() would lose what was read together with the line before
    return run.returncode, errors


def test_a_signal_in_the_preparation_ends_the_run_in_order(config: Path, tmp_path: Path) -> None:
    status, errors = stopped(config, "preparation", signal.SIGHUP)

    assert status == 128 + signal.SIGHUP
    assert errors == "penstock: the run was stopped by SIGHUP before its first step\n"
    assert not [path for path in tmp_path.glob("run/**/*") if path.is_file()]


@pytest.mark.long
def test_a_signal_in_the_first_evaluation_ends_the_run_without_a_checkpoint(config: Path, tmp_path: Path) -> None:
    status, errors = stopped(config, "first evaluation", signal.SIGTERM)

    assert status == 128 + signal.SIGTERM
    assert "penstock: the run was stopped by SIGTERM\n" in errors
    assert "Traceback" not in errors
    assert not list(tmp_path.glob("run/checkpoints/step-*"))


def test_a_signal_after_the_last_step_ends_the_evaluation_and_keeps_what_was_trained(
    config: Path, tmp_path: Path
) -> None:
    status, errors = stopped(config, "second evaluation", signal.SIGINT)

    assert status == 130
    assert "penstock: the run was stopped by SIGINT\n" in errors
    assert "Traceback" not in errors
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == configured_run.STEPS
    assert summary["accuracy_after"] is None
    assert Path(tmp_path, summary["checkpoint"]).exists()
