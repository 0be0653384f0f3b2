"""Every example runs as its reader would run it, and prints the output in its README."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.warned import strict

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
HABITUAL = EXAMPLES.parent / "tests" / "atropos" / "guessing.py"
SMALL = ["hello.py", "custom_stage.py", "two_processes.py"]
RUNS = ["arithmetic_grpo.py", "distillation.py", "two_ranks.py", "atropos_gateway.py"]
LONGEST = 90


def run(name: str) -> str:
    command = [sys.executable, str(EXAMPLES / name)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=strict())
    assert ran.returncode == 0, ran.stderr
    assert not ran.stderr
    return ran.stdout


def test_hello_prints_the_rewards_of_three_groups() -> None:
    lines = run("hello.py").splitlines()

    assert [line.partition(":")[0] for line in lines] == ["group 0", "group 1", "group 2"]


def test_custom_stage_takes_its_penalty_off_the_reward() -> None:
    assert "prompt 3: lengths [5, 9], rewards [1.0, 0.5]" in run("custom_stage.py").splitlines()


def test_two_processes_count_every_token_that_was_sent() -> None:
    assert run("two_processes.py") == "8000 trajectories, 8192000 tokens; the sampler exited with 0\n"


def test_two_ranks_train_as_one_process() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(EXAMPLES / "two_ranks.py")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)

    assert ran.returncode == 0, ran.stderr
    assert [line.partition(":")[0] for line in ran.stdout.splitlines()] == [f"step {step}" for step in range(1, 6)]


def test_an_environment_written_for_atropos_teaches_a_table_nine_digits_of_ten() -> None:
    *_, last = run("atropos_gateway.py").splitlines()

    assert right(last) >= 90


def right(printed: str) -> int:
    """Percent."""
    found = re.fullmatch(r"20 steps; (\d+)% of the guesses are right", printed)
    assert found
    return int(found[1])


def test_so_does_one_that_polls_cancels_and_connects_anew_for_every_request() -> None:
    command = [sys.executable, str(EXAMPLES / "atropos_gateway.py"), str(HABITUAL)]
    paths = strict(os.environ | {"PYTHONPATH": str(EXAMPLES.parent)})
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=paths)

    assert ran.returncode == 0, ran.stderr
    *_, counts, last = ran.stdout.splitlines()
    printed = json.loads(counts)
    assert right(last) >= 90
    assert printed["refused"] == 0
    assert printed["dropped"] <= 8  # what its workers were sending when the last step was done
    assert min(printed["cancelled"], printed["filtered"]) > 0


@pytest.mark.parametrize("name", [*SMALL, *RUNS])
def test_an_example_is_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) <= LONGEST


def test_the_readme_names_every_example_in_reading_order() -> None:
    text = (EXAMPLES / "README.md").read_text()

    assert re.findall(r"^\d\. \[(\w+\.py)\]", text, re.MULTILINE) == [*SMALL, *RUNS]


def test_every_example_script_is_in_the_readme() -> None:
    scripts = {path.name for path in EXAMPLES.glob("*.py")}

    assert {name for name in scripts if not name.startswith("test_")} == {*SMALL, *RUNS}
