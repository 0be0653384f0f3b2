"""A chain that does not fit is refused by both type checkers, at the line that is wrong, in a user's own folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.installation import ROOT, Installed

ACCEPTED = "tests/typing/chains.py"
REFUSED = "tests/typing/refused.py"

MYPY = ("mypy", "--strict", "--no-pretty", "--explicit-package-bases", "--python-executable")


WITHOUT_TORCH = "[mypy]\n[mypy-torch.*,transformers.*,datasets.*]\nfollow_imports = skip\n"
"""No chain has a type of theirs, and to read them takes longer than all of penstock."""


def marked() -> set[tuple[str, int]]:
    """Return the lines that are marked as errors, as (file, line)."""
    lines = (ROOT / REFUSED).read_text().splitlines()
    return {(REFUSED, number) for number, line in enumerate(lines, start=1) if "# refused: " in line}


def check(folder: Path, *arguments: str) -> str:
    """Run a checker over the copied chains, outside of the checkout and its configuration."""
    for path in (ACCEPTED, REFUSED):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / path)
    (folder / "mypy.ini").write_text(WITHOUT_TORCH)
    command = [sys.executable, "-m", *arguments, ACCEPTED, REFUSED]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.long
def test_mypy_refuses_exactly_the_chains_that_do_not_fit(installed: Installed, tmp_path: Path) -> None:
    output = check(tmp_path, *MYPY, str(installed.python))

    errors = [line.split(":") for line in output.splitlines() if ": error:" in line]
    assert {(path, int(line)) for path, line, *_ in errors} == marked()


@pytest.mark.long
def test_pyright_refuses_exactly_the_chains_that_do_not_fit(installed: Installed, tmp_path: Path) -> None:
    output = json.loads(check(tmp_path, "pyright", "--outputjson", "--pythonpath", str(installed.python)))

    errors = [each for each in output["generalDiagnostics"] if each["severity"] == "error"]
    assert {
        (str(Path(each["file"]).relative_to(tmp_path)), each["range"]["start"]["line"] + 1) for each in errors
    } == marked()
