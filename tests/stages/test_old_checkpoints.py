"""A SinkTrainer keeps as many checkpoints as `keep_checkpoints` states."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import anyio
import pytest

from penstock import GroupId, SinkTrainer, TrainBatch
from penstock.accounting import CommittedPrompts
from penstock.testing import batch, drive_sink
from penstock.training import latest_checkpoint, write_checkpoint


def _write(into: Path, text: str) -> None:
    (into / "file").write_text(text)


def write(text: str, folder: Path, step: int) -> Path:
    return write_checkpoint(folder, step, lambda into: _write(into, text))


class Writer:
    """A trainer that has done `steps`, and writes one file."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.committed: Mapping[GroupId, int] = {}

    def step(self, _batch: TrainBatch) -> dict[str, float]:
        self.steps += 1
        return {}

    def save(self, folder: Path, _committed: CommittedPrompts) -> Path:
        return write("whole", folder, self.steps)


def train(folder: Path, step: int, keep: int) -> None:
    """Train one step, `step`, and write its checkpoint."""
    sink = SinkTrainer(Writer(step - 1), checkpoints=folder, keep_checkpoints=keep)
    anyio.run(drive_sink, sink, [batch()])


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_of_several_checkpoints_of_a_step_that_a_kill_left_the_last_is_the_latest(tmp_path: Path) -> None:
    for number in range(1, 13):
        path = tmp_path / ("step-00000001" if number == 1 else f"step-00000001.{number}")
        path.mkdir()

    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000001.12"
    train(tmp_path, 2, keep=2)
    assert names_in(tmp_path) == ["step-00000001.12", "step-00000002"]


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    for step in (8, 9, 10):
        write("whole", tmp_path, step)

    train(tmp_path, 11, keep=2)

    assert names_in(tmp_path) == ["step-00000010", "step-00000011"]


def test_fewer_than_are_to_be_kept_are_not_removed(tmp_path: Path) -> None:
    train(tmp_path, 8, keep=3)

    assert names_in(tmp_path) == ["step-00000008"]


def test_the_checkpoint_that_was_just_written_is_kept_also_beside_others_of_higher_steps(tmp_path: Path) -> None:
    for step in (8, 9):
        write("whole", tmp_path, step)

    train(tmp_path, 3, keep=1)

    assert names_in(tmp_path) == ["step-00000003", "step-00000009"]


def test_an_interrupted_removal_leaves_no_incomplete_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(path: Path) -> None:
        (path / "file").unlink()
        raise InterruptedError

    for step in (1, 2):
        write("whole", tmp_path, step)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", interrupt)
        with pytest.raises(InterruptedError):
            train(tmp_path, 3, keep=1)

    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000003"]
    write("whole", tmp_path, 4)
    assert names_in(tmp_path) == ["step-00000003", "step-00000004"]
