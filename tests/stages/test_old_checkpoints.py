from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from penstock._stages.training.checkpoint import remove_old_checkpoints
from penstock.training import latest_checkpoint, write_checkpoint


def _write(into: Path, text: str) -> None:
    (into / "file").write_text(text)


def write(text: str, folder: Path, step: int) -> Path:
    return write_checkpoint(folder, step, lambda into: _write(into, text))


def test_what_a_kill_leaves_of_the_one_before_is_not_the_latest(tmp_path: Path) -> None:
    for number in range(1, 13):
        path = tmp_path / ("step-00000001" if number == 1 else f"step-00000001.{number}")
        path.mkdir()
    last = tmp_path / "step-00000001.12"

    assert latest_checkpoint(tmp_path) == last
    remove_old_checkpoints(tmp_path, last, keep=1)
    assert names_in(tmp_path) == [last.name]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    *_, newest = [write("whole", tmp_path, step) for step in (8, 9, 10, 11)]

    remove_old_checkpoints(tmp_path, newest, keep=2)

    assert names_in(tmp_path) == ["step-00000010", "step-00000011"]


def test_fewer_than_are_to_be_kept_all_stay(tmp_path: Path) -> None:
    only = write("whole", tmp_path, 8)

    remove_old_checkpoints(tmp_path, only, keep=3)

    assert names_in(tmp_path) == ["step-00000008"]


def test_the_checkpoint_that_was_just_written_stays_also_where_others_are_of_higher_steps(tmp_path: Path) -> None:
    _, _, newest = [write("whole", tmp_path, step) for step in (8, 9, 3)]

    remove_old_checkpoints(tmp_path, newest, keep=1)

    assert names_in(tmp_path) == ["step-00000003", "step-00000009"]


def test_a_removal_that_stops_half_way_leaves_no_torn_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(path: Path) -> None:
        (path / "file").unlink()
        raise InterruptedError

    *_, newest = [write("whole", tmp_path, step) for step in (1, 2, 3)]
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", stop)
        with pytest.raises(InterruptedError):
            remove_old_checkpoints(tmp_path, newest, keep=1)

    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000003"]
    write("whole", tmp_path, 4)
    assert names_in(tmp_path) == ["step-00000003", "step-00000004"]
