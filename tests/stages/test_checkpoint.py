from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock._stages.training.checkpoint import remove_old_checkpoints
from penstock.training import latest_checkpoint, write_checkpoint


def write(text: str, folder: Path, step: int) -> Path:
    return write_checkpoint(folder, step, lambda into: _write(into, text))


def _write(into: Path, text: str) -> None:
    (into / "file").write_text(text)


def test_the_latest_checkpoint_is_that_of_the_highest_step(tmp_path: Path) -> None:
    for step in (9, 10, 123_456_789):
        write(f"of {step}", tmp_path, step)

    latest = latest_checkpoint(tmp_path)

    assert latest is not None
    assert (latest / "file").read_text() == "of 123456789"


def test_where_nothing_was_saved_there_is_no_checkpoint(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "nowhere") is None


def test_a_checkpoint_that_fails_half_way_is_not_there(tmp_path: Path) -> None:
    def fail(into: Path) -> None:
        _write(into, "half")
        raise OSError("the disk is full")

    before = write("whole", tmp_path, 1)
    with pytest.raises(OSError, match="the disk is full"):
        write_checkpoint(tmp_path, 2, fail)

    assert latest_checkpoint(tmp_path) == before


def test_what_a_killed_run_left_half_way_is_swept_by_the_next_checkpoint(tmp_path: Path) -> None:
    (tmp_path / ".unfinished-1").mkdir()
    (tmp_path / ".unfinished-1" / "file").write_text("half")

    write("whole", tmp_path, 2)

    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    write("first", tmp_path, 1)

    second = write("second", tmp_path, 1)

    assert (second / "file").read_text() == "second"
    assert list(tmp_path.iterdir()) == [second]


KILLED_AT_EVERY_MOMENT = """
import itertools, os, shutil, signal, sys
from pathlib import Path
from penstock._stages.training.checkpoint import latest_checkpoint, write_checkpoint

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "open"}

def write(folder, text):
    write_checkpoint(folder, 1, lambda into: (into / "file").write_text(text))

def write_and_die(folder, moment):
    changes = itertools.count()
    def die(event, _):
        if event in CHANGES and next(changes) == moment:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(die)
    write(folder, "second")
    os._exit(0)

for moment in itertools.count():
    folder = Path(sys.argv[1]) / str(moment)
    write(folder, "first")
    if not (pid := os.fork()):
        write_and_die(folder, moment)
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(ended, (latest_checkpoint(folder) / "file").read_text())
    write(folder, "third")
    assert [(path / "file").read_text() for path in folder.iterdir()] == ["third"]
    if ended == 0:
        break
"""


def test_a_kill_at_any_moment_of_replacing_a_checkpoint_leaves_one_of_both(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED_AT_EVERY_MOMENT, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)

    assert ran.returncode == 0, ran.stderr
    *killed, (last, left) = [line.split() for line in ran.stdout.splitlines()]
    assert {status for status, _ in killed} == {str(-signal.SIGKILL)}
    assert [text for _, text in killed] == sorted(
        text for _, text in killed
    )  # the first, and from a moment on the second
    assert {text for _, text in killed} == {"first", "second"}
    assert (last, left) == ("0", "second")


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
