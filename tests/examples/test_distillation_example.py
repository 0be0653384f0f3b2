"""The example of distillation, in a few small steps: each of its three curves begins, goes on and ends in an exam."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SCRIPT = EXAMPLES / "distillation.py"

SHORTER = f"""
import sys
from pathlib import Path
sys.argv, sys.path = ["distillation.py"], [{str(EXAMPLES)!r}, *sys.path]
from arithmetic.warm_up import warm_up
warm_up.__defaults__ = (20,)
source = Path({str(SCRIPT)!r}).read_text()
for full, little in {{"= 250, 100, 0.95, 200": "= 5, 5, 0.95, 20", "sequences=512": "sequences=32"}}.items():
    assert full in source
    source = source.replace(full, little)
exec(compile(source, {str(SCRIPT)!r}, "exec"), {{"__name__": "__main__", "__file__": {str(SCRIPT)!r}}})
"""
"""The script with a warm-up of a second and five small steps of each kind."""


@pytest.mark.timeout(60)
def test_three_curves_are_printed_each_with_its_final_exam() -> None:
    ran = subprocess.run([sys.executable, "-c", SHORTER], capture_output=True, text=True, check=False, timeout=50)

    assert ran.returncode == 0, ran.stderr
    named = re.findall(r"^(.+)\n +0: \d+\.\d%\n +5: \d+\.\d%\nfinal exam: \d+\.\d%$", ran.stdout, re.MULTILINE)
    assert named == [
        "the teacher, by reinforcement",
        "a student, by distillation",
        "the same student, by reinforcement alone",
    ]
