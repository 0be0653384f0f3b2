"""The state of a flow is kept for each step from which ROLL can resume."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock._stages.integrations.roll.step_files import StepFiles
from penstock.errors import FileDamaged


def test_the_state_of_the_step_that_roll_resumes_is_loaded(tmp_path: Path) -> None:
    files = StepFiles(tmp_path / "penstock/sums", save_steps=2)
    for step in range(6):
        files.save(step, {"step": step})

    with capture_logs() as logs:
        assert files.load(4) == {"step": 4}
    assert logs == []


def test_files_of_checkpoints_and_of_the_last_step_are_kept(tmp_path: Path) -> None:
    files = StepFiles(tmp_path, save_steps=2)

    for step in range(6):
        files.save(step, {})

    assert {path.name for path in tmp_path.iterdir()} == {"0.json", "2.json", "4.json", "5.json"}


def test_an_earlier_state_is_used_with_a_warning(tmp_path: Path) -> None:
    files = StepFiles(tmp_path, save_steps=2)
    files.save(2, {"step": 2})

    with capture_logs() as logs:
        assert files.load(4) == {"step": 2}
        assert files.load(1) is None
    assert [(log["event"], log["step"], log["found"]) for log in logs] == [
        ("resumed_without_ledger", 4, 2),
        ("resumed_without_ledger", 1, None),
    ]


def test_a_run_from_the_first_step_forgets_an_earlier_one(tmp_path: Path) -> None:
    files = StepFiles(tmp_path, save_steps=2)
    files.save(2, {})

    files.clear()

    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "3.json").write_text("{")

    with pytest.raises(FileDamaged, match=r"3\.json: expected to read back what was written, got .*: remove it"):
        StepFiles(tmp_path, save_steps=2).load(3)
