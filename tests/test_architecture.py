"""docs/architecture.md names files that a group really runs through, and the totals that the script prints."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/architecture.md").read_text()
PROTOCOL = "stages/contracts/policies.py"
"""Has no code that runs: the engine of the script implements it."""

TOTALS = {
    "group": r"one group in.*?about (\d+)\s+functions in (\d+)\s+files",
    "stop": r"about (\d+)\s+functions in (\d+)\s+files, most of them in the running step",
    "death": r"with such a death between.*?about (\d+) functions in (\d+) files",
    "capacity": r"about (\d+) functions in (\d+) files hold the value",
}
"""Where the page gives the totals of a subject of scripts/trace.py: functions, then files."""


@cache
def traced(subject: str) -> dict[str, int]:
    """Return the files that the subject runs through, with the number of functions in each."""
    printed = subprocess.run(
        [sys.executable, "scripts/trace.py", subject], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = (line.partition(": ") for line in printed.stdout.splitlines())
    return {path: names.count(", ") + 1 for path, _, names in lines if names}


def test_a_group_runs_through_each_file_from_the_environment_to_the_optimizer_step() -> None:
    rows = re.findall(r"^\| [2-9]\. .*$", PAGE, re.MULTILINE)
    named = {path for row in rows for path in re.findall(r"\]\(\.\./([\w/]+\.py)\)", row)}

    assert len(rows) == 8
    assert named - traced("group").keys() == {PROTOCOL}


@pytest.mark.parametrize("subject", TOTALS)
def test_the_totals_of_the_page_are_those_of_the_script_within_a_tenth_or_two(subject: str) -> None:
    given = re.search(TOTALS[subject], PAGE, re.DOTALL)
    files = traced(subject)

    assert given is not None
    assert [int(total) for total in given.groups()] == pytest.approx([sum(files.values()), len(files)], rel=0.1, abs=2)
