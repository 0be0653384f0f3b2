"""The notebook's cells run without Jupyter, and the tiny model that it makes learns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests import command_line

from penstock.runs import describe_run, load_run_config

ROOT = Path(__file__).parent.parent.parent
NOTEBOOK = ROOT / "examples" / "first_run.ipynb"


def ran(folder: Path) -> tuple[dict[str, float], str]:
    """Run the cells in `folder`; return the summary of the run, and what the cells printed."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where the command `penstock` is
    done = subprocess.run(
        [sys.executable, "-c", (ROOT / "tests" / "notebooks.py").read_text(), str(NOTEBOOK)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=os.environ | {"PATH": path},
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "first-run" / "run" / "summary.json").read_text()), done.stdout


def test_the_tiny_folder_has_a_configuration_that_describes_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "reward", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert command_line.ran("init", tmp_path, "--tiny")[0] == 0

    described = describe_run(load_run_config(tmp_path / "config.yaml"))
    monkeypatch.delitem(sys.modules, "reward")

    assert "a completion ends after '#'" in described
    assert described.splitlines()[-1].endswith("#:")
    status, printed = command_line.ran("init", tmp_path, "--tiny")
    assert status == 1
    assert "expected a folder without config.yaml, reward.py, data.jsonl, model" in printed


@pytest.mark.long
def test_the_cells_of_the_notebook_run_in_order_and_the_model_learns(tmp_path: Path) -> None:
    summary, printed = ran(tmp_path)

    assert summary["steps"] == 120
    assert "120 steps in" in printed
    assert "step   1  reward 0." in printed
    assert summary["reward_before"] < 0.1
    assert summary["reward_after"] > 0.3
    assert command_line.ran("diagnose", tmp_path / "first-run" / "run")[0] == 0
