"""Runs of `watched_run.py`, and the command line beside them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests import command_line

PENSTOCK = [sys.executable, "-c", "from penstock._cli import main; main()"]


@contextmanager
def waiting_run(folder: Path, steps: int) -> Iterator[subprocess.Popen[str]]:
    """Start a run that waits after so many steps; kill it at the end of the body."""
    command = [sys.executable, "-m", "tests.commands.watched_run", str(folder), str(steps)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        try:
            assert run.stdout is not None
            assert run.stdout.readline() == f"trained {steps}\n"
            yield run
        finally:
            run.kill()


def finish(folder: Path) -> None:
    """Run, or continue, to the end."""
    subprocess.run([sys.executable, "-m", "tests.commands.watched_run", str(folder), "0"], check=True)


def printed(*arguments: object, status: int = 0) -> str:
    """Run the command line in this process; return its output, or its message where it fails."""
    ended, output = command_line.ran(*arguments)
    assert ended == status, output
    return output


def printed_behind(prefix: Sequence[str], *arguments: object) -> str:
    """Run the command line in a process that `prefix` begins; return its output."""
    command = [*prefix, "env", "COLUMNS=200", *PENSTOCK, *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not ran.returncode, ran.stdout + ran.stderr
    return ran.stdout
