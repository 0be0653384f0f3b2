"""A pipeline in a script of its own: started, interrupted, killed; and no worker outlives it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.cells import cells
from tests.failsafe import FAILSAFE_S
from tests.processes.children import children_of

SCRIPT = Path(__file__).with_name("script_of_a_user.py")


@contextmanager
def script(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run the script in a process group of its own, as under a terminal."""
    command = [sys.executable, str(SCRIPT), *arguments]
    variables = os.environ | {"PYTHONFAULTHANDLER": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0, env=variables
    ) as running:
        try:
            yield running
        except BaseException:
            for pid in [*children_of(running.pid), running.pid]:
                os.kill(pid, signal.SIGABRT)  # each prints the stacks of its threads
            sys.stderr.write(running.communicate()[1])
            raise
        finally:
            running.kill()


def workers_of(running: subprocess.Popen[str]) -> list[int]:
    """Return pidfds of the script's workers, once both run."""
    assert running.stdout is not None
    for line in running.stdout:
        if line.startswith("workers "):
            return [os.pidfd_open(int(pid)) for pid in line.split()[1:]]
    raise AssertionError(f"the script ended: {running.stderr.read() if running.stderr else ''}")


def all_ended(workers: list[int], within_s: float = FAILSAFE_S) -> bool:
    """Return whether all workers end within the time."""
    ended = [bool(select.select([pidfd], [], [], within_s)[0]) for pidfd in workers]
    for pidfd in workers:
        os.close(pidfd)
    return all(ended)


def test_stages_that_live_in_the_script_reach_their_workers() -> None:
    with script() as running:
        out, errors = running.communicate()

    assert running.returncode == 0, errors
    assert "ended end of stream" in out
    assert out.count("imported") == 3  # here, and in each of two workers, which need its stages


@pytest.mark.parametrize("how", cells(["standard input", "an argument"], run=["an argument"]))
def test_stages_of_a_script_that_is_in_no_file_reach_their_workers(how: str) -> None:
    text = SCRIPT.read_text()
    arguments, given = (["-"], text) if how == "standard input" else (["-c", text], None)

    ran = subprocess.run([sys.executable, *arguments], input=given, capture_output=True, text=True, check=False)

    assert ran.returncode == 0, ran.stderr
    assert "ended end of stream" in ran.stdout
    assert ran.stdout.count("imported") == 1  # here alone: its stages are pickled by value


def test_ctrl_c_reaches_the_parent_alone_which_ends_everything() -> None:
    with script("forever") as running:
        workers = workers_of(running)
        os.killpg(running.pid, signal.SIGINT)
        out, errors = running.communicate()

    assert all_ended(workers, within_s=0)
    assert "ended stopped by SIGINT" in out
    assert running.returncode == 130
    assert "Traceback" not in errors
    assert "worker.py" not in errors  # workers end in silence


@pytest.mark.parametrize(
    "stopped", [pytest.param(False, id="running", marks=pytest.mark.long), pytest.param(True, id="frozen")]
)
def test_workers_die_with_their_parent(stopped: bool) -> None:  # noqa: FBT001 (a parameter)
    with script("forever") as running:
        workers = workers_of(running)
        if stopped:
            for pidfd in workers:
                signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        running.kill()

    assert all_ended(workers)


def test_a_script_without_a_guard_is_an_error_with_the_remedy() -> None:
    with script("unguarded") as running:
        _, errors = running.communicate()

    assert running.returncode == 1
    assert "WorkerFailed" in errors
    assert "expected the run to be under `if __name__ == '__main__':`" in errors
