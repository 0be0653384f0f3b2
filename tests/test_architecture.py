"""docs/architecture.md names files that a group really runs through, and the totals that the script prints."""

from __future__ import annotations

import re
import subprocess
import sys
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


EACH_IN_A_FORK = """
import os, runpy, sys
import penstock.torch, torch._dynamo
for subject in sys.argv[1:]:
    print(f"{subject}:", flush=True)
    if not os.fork():
        sys.argv = ["scripts/trace.py", subject]
        runpy.run_path("scripts/trace.py", run_name="__main__")
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0
"""
"""Runs scripts/trace.py for each subject; the imports take longer than the rest, above all while calls are traced."""


def traced(*subjects: str) -> dict[str, dict[str, int]]:
    """Return the files that each subject runs through, with the number of functions in each."""
    printed = subprocess.run(
        [sys.executable, "-c", EACH_IN_A_FORK, *subjects], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    lines = (line.partition(": ") for line in printed.splitlines())
    found: dict[str, dict[str, int]] = {}
    subject: dict[str, int] = {}
    for path, _, names in lines:
        if path.removesuffix(":") in subjects:
            subject = found[path.removesuffix(":")] = {}
        elif names:
            subject[path] = names.count(", ") + 1
    return found


@pytest.fixture(scope="module")
def in_one_process() -> dict[str, dict[str, int]]:
    return traced("group", "stop", "capacity")


def test_a_group_runs_through_each_file_from_the_environment_to_the_optimizer_step(
    in_one_process: dict[str, dict[str, int]],
) -> None:
    rows = re.findall(r"^\| [2-9]\. .*$", PAGE, re.MULTILINE)
    named = {path for row in rows for path in re.findall(r"\]\(\.\./([\w/]+\.py)\)", row)}

    assert len(rows) == 8
    assert named - in_one_process["group"].keys() == {PROTOCOL}


@pytest.mark.parametrize("subject", ["group", "stop", "capacity"])
def test_the_totals_of_the_page_are_those_of_the_script_within_a_tenth_or_two(
    subject: str, in_one_process: dict[str, dict[str, int]]
) -> None:
    assert given_totals(subject) == pytest.approx(totals(in_one_process[subject]), rel=0.1, abs=2)


@pytest.mark.long
def test_so_are_those_of_a_worker_that_dies() -> None:
    assert given_totals("death") == pytest.approx(totals(traced("death")["death"]), rel=0.1, abs=2)


def given_totals(subject: str) -> list[int]:
    given = re.search(TOTALS[subject], PAGE, re.DOTALL)
    assert given is not None
    return [int(total) for total in given.groups()]


def totals(files: dict[str, int]) -> list[int]:
    return [sum(files.values()), len(files)]
