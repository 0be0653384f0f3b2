"""docs/atropos-verl.md as its reader follows it: a real environment of Atropos, a gateway, and verl's loss on a CPU."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from tests.atropos_verl_real.launching import SEQUENCES, STEPS, Launched, launched, make_folder

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("data"))


STATES = "trained", "filtered", "stale", "rejected", "failed", "lost", "unfinished"


def balance(launch: Launched) -> dict[str, int]:
    """Return the trainer's balance, as its report has it: what was begun, and each state in which some ended."""
    return {
        name: int(count)
        for name, count in re.findall(rf"^(begun|{'|'.join(STATES)}) +(\d+)", launch.output, re.MULTILINE)
    }


def test_the_page_trains_to_its_last_step_and_all_programs_end(data: Path, tmp_path: Path) -> None:
    with launched(tmp_path, data) as launch:
        assert launch.end() == 0, launch.told

    assert f"step {STEPS}: " in launch.output
    assert balance(launch) == {"begun": STEPS * SEQUENCES, "trained": STEPS * SEQUENCES}
    accepted, given, waiting = launch.counts()
    assert given >= STEPS * SEQUENCES
    assert accepted == given + waiting
    versions = sorted(path.parent.name for path in (tmp_path / "weights").rglob("*.safetensors"))
    assert versions[-1] == f"step-{STEPS:08}"


@pytest.mark.parametrize("killed", ["gsm8k", "gateway", "trainer"])
def test_a_kill_on_either_side_ends_in_numbers_that_balance(killed: str, data: Path, tmp_path: Path) -> None:
    with launched(tmp_path, data, steps=1000) as launch:
        launch.until_ready("gsm8k")
        launch.until_step(2)
        os.kill(launch.pids[killed], signal.SIGKILL)
        status = launch.end()

    assert status == (128 + signal.SIGKILL if killed == "trainer" else 1), launch.told
    assert re.search(rf"penstock: {killed} \(pid \d+\) was killed by SIGKILL", launch.told)
    if killed != "gateway":
        accepted, given, waiting = launch.counts()
        assert accepted == given + waiting
    if killed != "trainer":
        found = balance(launch)
        assert found["trained"] >= 2 * SEQUENCES, launch.output
        assert found.pop("begun") == sum(found.values())
