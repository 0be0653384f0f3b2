"""Processes that a subreaper starts: cleanup after a failed start, and the description of their end."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from penstock._pipeline.servers.subreaper_process import describe_end, start_subreaper


def open_pipes() -> set[str]:
    """Return the inodes of all pipes of this process."""
    found = set[str]()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.add(str(path.readlink()))
    return {name for name in found if name.startswith("pipe:")}


def test_a_keeper_that_cannot_be_started_leaves_no_descriptor_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    before = open_pipes()

    with pytest.raises(FileNotFoundError):
        start_subreaper(["true"], 1.0)

    assert open_pipes() <= before


@pytest.mark.parametrize(
    ("command", "description"),
    [
        (["sh", "-c", "exit 3"], "exited with status 3"),
        (["sh", "-c", "kill -KILL $$"], "was killed by SIGKILL"),
        (["/absent"], "could not be started: No such file or directory"),
    ],
)
def test_the_end_of_the_command_is_described(command: list[str], description: str) -> None:
    kept = start_subreaper(command, 1.0)

    assert kept.popen.wait() == 0
    with os.fdopen(kept.status_fd) as lines:
        word, value = [*lines][-1].split()
    os.close(kept.stop_fd)

    assert describe_end(word, int(value)) == description


def test_a_real_time_signal_is_named_by_its_number() -> None:
    assert describe_end("ended", signal.SIGRTMIN + 1) == f"was killed by signal {signal.SIGRTMIN + 1}"


STARTER = """
import sys
from penstock._pipeline.servers.subreaper_process import start_subreaper

print(start_subreaper(["sleep", "1000"], 1.0, folder=sys.argv[1]).popen.pid, flush=True)
sys.stdin.read()
"""


def folder_in(path: Path) -> Path:
    (path / "temporary" / "within").mkdir(parents=True)
    return path / "temporary"


def test_the_folder_of_a_command_is_removed_when_that_has_ended(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)

    kept = start_subreaper(["true"], 1.0, folder=str(folder))
    kept.popen.wait()

    assert not folder.exists()
    os.close(kept.stop_fd)
    os.close(kept.status_fd)


def test_the_folder_of_a_command_is_removed_when_the_process_that_started_it_is_killed(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    command = [sys.executable, "-c", STARTER, str(folder)]

    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        subreaper = os.pidfd_open(int(starter.stdout.readline()))
        starter.kill()
    select.select([subreaper], [], [])

    assert not folder.exists()
    os.close(subreaper)
