"""Processes that a subreaper starts: cleanup after a failed start, and the description of their end."""

from __future__ import annotations

import os
import signal
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
