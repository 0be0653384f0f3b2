"""The command `penstock` itself, also as a module of the interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.command_line import ran

import penstock
from penstock.errors import InvalidConfig, PenstockError, StageFailed, WorkerFailed


def test_the_command_says_its_version_and_as_a_module_names_itself() -> None:
    installed, module = Path(sys.executable).parent / "penstock", [sys.executable, "-m", "penstock"]

    version = subprocess.run([installed, "--version"], capture_output=True, text=True, check=True)
    helped = subprocess.run([*module, "--help"], capture_output=True, text=True, check=True)

    assert version.stdout == f"penstock {penstock.__version__}\n"
    assert "Usage: penstock [OPTIONS] COMMAND" in helped.stdout


def raised_in_a_stage(cause: Exception) -> StageFailed:
    """Return the failure of a stage that raised `cause`."""
    failed = StageFailed(f"Judge raised {type(cause).__name__}: {cause}")
    failed.__cause__ = cause
    return failed


@pytest.mark.parametrize(
    ("error", "line", "traced"),
    [
        (InvalidConfig("seed: expected 1"), "seed: expected 1", ""),
        (FileNotFoundError("no such file"), "no such file", ""),
        (raised_in_a_stage(InvalidConfig("url: expected tcp")), "Judge raised InvalidConfig: url: expected tcp", ""),
        (raised_in_a_stage(KeyError("prompt")), "Judge raised KeyError: 'prompt'", "KeyError: 'prompt'"),
        (WorkerFailed("Source 1/1 was killed by SIGKILL"), "Source 1/1 was killed by SIGKILL", ""),
        (
            WorkerFailed("Source 1/1 raised KeyError: 'a'\n\nIn the worker:\n\nTraceback … in run\n"),
            "Source 1/1 raised KeyError: 'a'",
            "In the worker:\n\nTraceback … in run\n",
        ),
    ],
)
def test_a_command_ends_with_one_line_and_a_traceback_of_other_code_comes_before(
    error: PenstockError | OSError,
    line: str,
    traced: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(**_: object) -> None:
        raise error

    monkeypatch.setattr("penstock._cli.app.commands", fails)
    monkeypatch.setattr("penstock._cli.app._leave_ctrl_c_to_the_kernel", lambda: None)

    status, printed = ran("run")

    before, _, last = printed.removesuffix("\n").rpartition("penstock: ")
    assert (status, last) == (1, line)
    assert traced in before
    assert bool(before) == bool(traced)
