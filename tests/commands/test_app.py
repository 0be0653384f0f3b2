"""The command `penstock` itself, also as a module of the interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import penstock

COMMANDS = {"installed": [str(Path(sys.executable).parent / "penstock")], "module": [sys.executable, "-m", "penstock"]}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_the_command_says_its_version_and_names_itself_however_it_is_called(command: list[str]) -> None:
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    helped = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)

    assert version.stdout == f"penstock {penstock.__version__}\n"
    assert "Usage: penstock [OPTIONS] COMMAND" in helped.stdout
