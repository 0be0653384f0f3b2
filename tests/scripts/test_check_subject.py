"""A commit subject is a capital letter, at most 72 characters, and no full stop."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/check_subject.sh"


def check(folder: Path, message: str) -> subprocess.CompletedProcess[str]:
    (folder / "message").write_text(message)
    return subprocess.run([SCRIPT, folder / "message"], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "subject", ["Refuse an empty batch", "A" * 72, "fixup! refuse it.", "Merge branch 'topic' of it."]
)
def test_a_subject_that_keeps_the_rules_is_accepted(tmp_path: Path, subject: str) -> None:
    assert check(tmp_path, f"{subject}\n\n{'a long line of the body, ' * 9}\n").returncode == 0


@pytest.mark.parametrize("subject", ["A" * 73, "Refuse an empty batch.", "refuse an empty batch", ""])
def test_any_other_subject_is_refused_with_the_rule(tmp_path: Path, subject: str) -> None:
    ran = check(tmp_path, f"{subject}\n\nbody\n")

    assert ran.returncode == 1
    assert "at most 72 characters" in ran.stderr
