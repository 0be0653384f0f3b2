"""A run over a data set is killed in both of its epochs: every row is trained once in each, as if it had not been."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.resumption.script_of_data import EPOCHS, NEVER, ROWS

from penstock.data import PromptDataset

ROOT = Path(__file__).parent.parent.parent


def ran(folder: Path, killed_in_step: int) -> int:
    """Run the script, and return its exit status."""
    command = [sys.executable, "-m", "tests.resumption.script_of_data", str(folder), str(killed_in_step)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert finished.returncode in {0, -signal.SIGKILL}, finished.stderr
    return finished.returncode


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return what was trained: (number, row, reward) of each prompt."""
    folder = tmp_path_factory.mktemp("run")
    statuses = [ran(folder, killed_in_step) for killed_in_step in (14, 23, NEVER)]
    assert statuses == [-signal.SIGKILL, -signal.SIGKILL, 0]
    newest = max((folder / "checkpoints").glob("step-*"))
    kept: list[Any] = json.loads((newest / "kept.json").read_text())["trained"]
    return kept


def test_every_row_is_trained_once_in_each_epoch(trained: list[Any]) -> None:
    counted = Counter((number // len(ROWS), row["prompt"]) for number, row, _ in trained)

    assert counted == {(epoch, row["prompt"]): 1 for epoch in range(EPOCHS) for row in ROWS}


def test_the_order_is_that_of_an_uninterrupted_run(trained: list[Any]) -> None:
    prompts = PromptDataset(ROWS, seed=5)()

    assert all(row == prompts.prompt(number).meta["row"] for number, row, _ in trained)


def test_the_columns_of_the_row_were_rewarded(trained: list[Any]) -> None:
    assert all(reward == row["answer"] for _, row, reward in trained)
