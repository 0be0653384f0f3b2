"""The walk of a group in docs/architecture.md names files that a group really runs through."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROTOCOL = "stages/engines/policies.py"
"""Has no code that runs: the engine of the script implements it."""


def test_a_group_runs_through_each_file_from_the_environment_to_the_optimizer_step() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    rows = re.findall(r"^\| [2-9]\. .*$", page, re.MULTILINE)
    named = {path for row in rows for path in re.findall(r"\]\(\.\./([\w/]+\.py)\)", row)}

    printed = subprocess.run(
        [sys.executable, "scripts/trace.py", "group"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    crossed = {line.partition(":")[0] for line in printed.stdout.splitlines()}

    assert len(rows) == 8
    assert named - crossed == {PROTOCOL}
