"""SIGTERM, Ctrl-C and SIGHUP stop a run in good order; a second one, or the deadline, ends the process."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import termios
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import pytest
from tests.processes.script_of_a_stopped_run import GROUPS
from tests.terminals import open_terminal

SCRIPT = "tests.processes.script_of_a_stopped_run"
ROOT = Path(__file__).parent.parent.parent
STOPPING = "the run is stopping"


@contextmanager
def script(how: str, moment: str, folder: Path | None, under: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
    """Run the script in a process group of its own, as under a terminal."""
    command = [*under, sys.executable, "-m", SCRIPT, how, moment, str(folder or "-")]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, process_group=0, cwd=ROOT
    ) as running:
        try:
            yield running
        finally:
            running.kill()


@contextmanager
def script_in_terminal(how: str, moment: str, folder: Path, line: int, stderr: int) -> Iterator[subprocess.Popen[str]]:
    """Run the script in a session of its own, whose terminal is `line`."""
    with subprocess.Popen(
        [sys.executable, "-m", SCRIPT, how, moment, str(folder)],
        stdin=line,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        cwd=ROOT,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 (a terminal of its own)
    ) as running:
        os.close(line)
        try:
            yield running
        finally:
            running.kill()


def read_until(stream: IO[str] | None, text: str) -> str:
    """Read `stream` up to the line that contains `text`."""
    assert stream is not None
    printed = ""
    for line in stream:
        printed += line
        if text in line:
            return printed
    raise AssertionError(f"expected {text!r}, got {printed}")


def go_on(running: subprocess.Popen[str], lines: int = 1) -> None:
    assert running.stdin is not None
    running.stdin.write("\n" * lines)
    running.stdin.flush()


def stopped_in_step_3(how: str, number: signal.Signals, folder: Path | None) -> tuple[subprocess.Popen[str], str, str]:
    """Send the signal to a script in its third step; return the script and its output."""
    with script(how, "in step 3", folder) as running:
        read_until(running.stdout, "in step 3")
        running.send_signal(number)
        errors = read_until(running.stderr, STOPPING)
        go_on(running)
        out, rest = running.communicate()
    return running, out, errors + rest


class Stopped(NamedTuple):
    """A run that was stopped by SIGTERM in its third step."""

    folder: Path
    status: int
    out: str
    errors: str


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """Stop a run, and return how it ended. Copy its folder before it goes on."""
    folder = tmp_path_factory.mktemp("stopped")
    running, out, errors = stopped_in_step_3("run", signal.SIGTERM, folder)
    return Stopped(folder, running.returncode, out, errors)


@pytest.fixture
def copied(stopped: Stopped, tmp_path: Path) -> Path:
    return shutil.copytree(stopped.folder, tmp_path / "copied", symlinks=True)


def checkpoints_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def trained_in(folder: Path) -> Counter[str]:
    return Counter((folder / "trained").read_text().splitlines())


OTHER_WAYS = ["anyio.run", "run_until_complete", "in_task_group", "in_asyncio_group", "gathered"]
"""The ways in which a script may await the run, besides `run` and the body of a task group."""


def check_stopped(status: int, out: str, errors: str, folder: Path, number: signal.Signals) -> None:
    """Check that a run in `folder` has finished its third step, and written a checkpoint, after signal `number`."""
    assert status == 128 + number, errors
    assert "Traceback" not in errors
    assert "Error" not in errors
    assert f"ended by: stopped by {number.name}, balanced: True" in out
    assert checkpoints_in(folder) == ["step-00000003"]


def test_sigterm_finishes_the_step_writes_a_checkpoint_and_ends_the_script_without_a_traceback(
    stopped: Stopped,
) -> None:
    check_stopped(stopped.status, stopped.out, stopped.errors, stopped.folder, signal.SIGTERM)


@pytest.mark.parametrize(
    ("how", "number"),
    [
        ("in_body_of_task_group", signal.SIGTERM),
        pytest.param("run_until_complete", signal.SIGINT, marks=pytest.mark.long),
        pytest.param("run", signal.SIGHUP, marks=pytest.mark.long),
        *(pytest.param(how, signal.SIGTERM, marks=pytest.mark.long) for how in OTHER_WAYS),
        pytest.param("run", signal.SIGINT, marks=pytest.mark.long),
    ],
)
def test_so_does_any_signal_in_however_the_script_awaits_the_run(
    how: str, number: signal.Signals, tmp_path: Path
) -> None:
    running, out, errors = stopped_in_step_3(how, number, tmp_path)

    check_stopped(running.returncode, out, errors, tmp_path, number)


def test_a_run_that_was_stopped_goes_on_in_its_folder_and_trains_everything_exactly_once(copied: Path) -> None:
    with script("run", "", copied) as running:
        _, errors = running.communicate()

    assert running.returncode == 0, errors
    trained = trained_in(copied)
    assert len(trained) == 2 * GROUPS
    assert set(trained.values()) == {1}


def test_a_stopped_run_prints_its_summary_and_how_to_resume(stopped: Stopped) -> None:
    folder, _, _, errors = stopped

    assert "penstock: the run was stopped by SIGTERM" in errors
    counted = re.search(r"(\d+) trajectories = 12 trained(?: \+ (\d+) unfinished)?$", errors, re.MULTILINE)
    assert counted is not None
    assert int(counted[1]) == 12 + int(counted[2] or 0)
    assert f"checkpoint: {folder}/checkpoints/step-00000003" in errors
    assert f"to resume: start the script again: it continues from the newest checkpoint in {folder}" in errors
    assert "lost" not in errors


def test_a_run_without_a_folder_reports_that_there_is_no_checkpoint() -> None:
    running, _, errors = stopped_in_step_3("run", signal.SIGINT, None)

    assert running.returncode == 130
    assert "checkpoint: none, for there is no folder for one: give Pipeline.run(folder=...)" in errors
    assert "to resume: not possible" in errors


def test_ctrl_c_in_a_terminal_reaches_no_worker_and_stops_the_run(tmp_path: Path) -> None:
    terminal, line = open_terminal()
    with script_in_terminal("run", "waiting", tmp_path, line, stderr=subprocess.PIPE) as running:
        read_until(running.stdout, "waiting")
        os.write(terminal, b"\x03")
        out, errors = running.communicate()
    os.close(terminal)

    assert running.returncode == 130, errors
    assert "Traceback" not in errors
    assert "ended by: stopped by SIGINT, balanced: True" in out
    assert checkpoints_in(tmp_path) == ["step-00000020"]
    assert len(trained_in(tmp_path)) == 2 * GROUPS


def test_a_terminal_that_is_closed_stops_the_run_and_what_it_prints_goes_nowhere(tmp_path: Path) -> None:
    terminal, line = open_terminal()
    with script_in_terminal("run", "printing", tmp_path, line, stderr=line) as running:
        read_until(running.stdout, "printing")
        os.close(terminal)
        out, _ = running.communicate()

    assert running.returncode == 129
    assert "ended by: stopped by SIGHUP, balanced: True" in out
    assert checkpoints_in(tmp_path) == ["step-00000020"]


@pytest.mark.long
def test_another_hangup_changes_nothing(tmp_path: Path) -> None:
    with script("run", "in step 3", tmp_path) as running:
        read_until(running.stdout, "in step 3")
        running.send_signal(signal.SIGHUP)
        read_until(running.stderr, STOPPING)
        running.send_signal(signal.SIGHUP)
        go_on(running)
        _, errors = running.communicate()

    assert running.returncode == 129, errors
    assert checkpoints_in(tmp_path) == ["step-00000003"]


def test_a_hangup_does_not_stop_a_run_under_nohup(tmp_path: Path) -> None:
    with script("run", "in step 3", tmp_path, ["nohup"]) as running:
        read_until(running.stdout, "in step 3")
        running.send_signal(signal.SIGHUP)
        go_on(running)
        out, errors = running.communicate()

    assert running.returncode == 0, errors
    assert "ended by: end of stream" in out


def test_a_signal_while_the_run_opens_stops_it_before_it_begins(tmp_path: Path) -> None:
    with script("run", "opening", tmp_path) as running:
        read_until(running.stdout, "opening")
        running.send_signal(signal.SIGTERM)
        go_on(running)
        out, errors = running.communicate()

    assert running.returncode == 143, errors
    assert "Traceback" not in errors
    assert "ended by: stopped by SIGTERM, balanced: True" in out
    assert "0 trajectories" in errors


def test_a_run_that_goes_on_and_is_stopped_at_once_keeps_its_checkpoint(copied: Path) -> None:
    kept = (copied / "checkpoints" / "step-00000003").stat().st_ino
    with script("run", "opening", copied) as running:
        read_until(running.stdout, "opening")
        running.send_signal(signal.SIGTERM)
        go_on(running)
        running.communicate()

    assert running.returncode == 143
    assert (copied / "checkpoints" / "step-00000003").stat().st_ino == kept
    steps, _ = json.loads((copied / "checkpoints" / "step-00000003" / "state").read_text())
    assert steps == 3


def test_all_runs_of_a_process_are_stopped_and_each_writes_its_checkpoint(tmp_path: Path) -> None:
    with script("twice", "in step 3", tmp_path) as running:
        read_until(running.stdout, "in step 3")
        read_until(running.stdout, "in step 3")
        running.send_signal(signal.SIGTERM)
        read_until(running.stderr, STOPPING)
        go_on(running, lines=2)
        _, errors = running.communicate()

    assert running.returncode == 143, errors
    assert "Traceback" not in errors
    assert [checkpoints_in(tmp_path / name) for name in ("one", "two")] == [["step-00000003"]] * 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (signal.SIGINT, signal.SIGINT),
        pytest.param(signal.SIGTERM, signal.SIGTERM, marks=pytest.mark.long),
        pytest.param(signal.SIGINT, signal.SIGTERM, marks=pytest.mark.long),
        (signal.SIGHUP, signal.SIGTERM),
    ],
)
def test_a_second_signal_ends_the_process_at_once(
    first: signal.Signals, second: signal.Signals, tmp_path: Path
) -> None:
    with script("run", "in step 3", tmp_path) as running:
        read_until(running.stdout, "in step 3")
        running.send_signal(first)
        read_until(running.stderr, STOPPING)
        running.send_signal(second)
        _, errors = running.communicate()

    assert running.returncode == 128 + second
    assert f"penstock: {second.name}: ended at once" in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("moment", ["hanging step", "blocked stage"])
def test_a_call_that_does_not_return_is_abandoned_at_the_deadline(moment: str, tmp_path: Path) -> None:
    with script("run", moment, tmp_path) as running:
        read_until(running.stdout, moment)
        running.send_signal(signal.SIGTERM)
        _, errors = running.communicate()

    assert running.returncode == 143, errors
    assert "SIGTERM: the run has not stopped within stop_timeout_s=1" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("moment", "printed"), [("installing", "the run was stopped by SIGTERM"), ("restoring", "ended: end of stream")]
)
def test_a_signal_while_the_handlers_change_ends_the_script_like_any_other(moment: str, printed: str) -> None:
    command = [sys.executable, "-m", "tests.processes.script_of_a_signal", moment]

    ended = subprocess.run(command, capture_output=True, text=True, check=False)

    assert ended.returncode == 143, ended.stderr
    assert "Traceback" not in ended.stderr
    assert f"penstock: {printed}\n" in ended.stderr
