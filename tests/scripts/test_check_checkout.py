"""`make test-atropos` and `make test-prime-rl` begin with a look at the checkout that they are given."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("given", [[], ["/nowhere"], [str(ROOT)]], ids=["nothing", "no folder", "another commit"])
def test_any_other_checkout_is_refused_with_the_command_that_makes_the_right_one(given: list[str]) -> None:
    wanted = ["test-atropos", "ATROPOS", "https://github.com/NousResearch/atropos", "296a0bc"]

    ran = subprocess.run(
        [ROOT / "scripts/check_checkout.sh", *wanted, *given], capture_output=True, text=True, check=False
    )

    assert ran.returncode == 1
    assert f"got {given[0] if given else 'nothing'}" in ran.stderr
    assert "git clone https://github.com/NousResearch/atropos" in ran.stderr
    assert "make test-atropos ATROPOS=atropos" in ran.stderr
