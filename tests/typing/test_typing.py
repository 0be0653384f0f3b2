"""A chain that does not fit is refused by both type checkers, at the line that is wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
ACCEPTED = "tests/typing/chains.py"
REFUSED = "tests/typing/refused.py"

CHECKING_S = 240
"""What a checker may take on a slow machine that checks the package for the first time."""


def marked() -> set[tuple[str, int]]:
    """The lines that say that they are wrong, as (file, line)."""
    lines = (ROOT / REFUSED).read_text().splitlines()
    return {(REFUSED, number) for number, line in enumerate(lines, start=1) if "# refused: " in line}


def check(*arguments: str) -> str:
    ran = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.timeout(CHECKING_S)
def test_mypy_refuses_exactly_the_chains_that_do_not_fit() -> None:
    told = check("mypy", "--no-error-summary", "--no-pretty", "--exclude", "^$", ACCEPTED, REFUSED)

    errors = [line.split(":") for line in told.splitlines() if ": error:" in line]
    assert {(path, int(line)) for path, line, *_ in errors if "tests/typing" in path} == marked()


@pytest.mark.timeout(CHECKING_S)
def test_pyright_refuses_exactly_the_chains_that_do_not_fit(tmp_path: Path) -> None:
    for path in (ACCEPTED, REFUSED):  # copied, for the project's configuration leaves out what is wrong on purpose
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    config = tmp_path / "pyrightconfig.json"
    config.write_text(json.dumps({"extraPaths": [str(ROOT / "src")], "typeCheckingMode": "standard"}))

    told = json.loads(check("pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(config)))

    errors = [each for each in told["generalDiagnostics"] if each["severity"] == "error"]
    assert {
        (str(Path(each["file"]).relative_to(tmp_path)), each["range"]["start"]["line"] + 1) for each in errors
    } == marked()
