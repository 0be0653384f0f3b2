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
        (path / "file").touch()

    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000001.12"
    train(tmp_path, 2, keep=2)
    assert names_in(tmp_path) == ["step-00000001.12", "step-00000002"]


@pytest.mark.parametrize(
    ("before", "step", "keep", "left"),
    [((8, 9, 10), 11, 2, [10, 11]), ((), 8, 3, [8]), ((8, 9), 3, 1, [3, 9])],
    ids=["newest", "fewer", "just written"],
)
def test_the_newest_checkpoints_and_the_one_just_written_are_kept(
    tmp_path: Path, before: tuple[int, ...], step: int, keep: int, left: list[int]
) -> None:
    for earlier in before:
        write("whole", tmp_path, earlier)

    train(tmp_path, step, keep=keep)

    assert names_in(tmp_path) == [f"step-{number:08d}" for number in left]


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
