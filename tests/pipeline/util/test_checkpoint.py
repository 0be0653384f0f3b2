from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_unfinished_files_of_a_killed_run_are_removed_by_the_next_checkpoint(tmp_path: Path) -> None:
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
from penstock.training import latest_checkpoint, write_checkpoint

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
