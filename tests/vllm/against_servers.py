"""`placement.servers`: one configuration starts ranks and vLLM itself, and goes on wherever one of them was killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.processes.children import children_of
from tests.vllm.against_vllm import NOISE, SETTINGS, questions, save

pytestmark = pytest.mark.timeout(1500)

STEPS = 3


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the configuration of a run of two ranks and a server."""
    values: dict[str, Any] = {
        "model": {"path": str(save(tmp_path / "model", 0))},
        "data": {"path": str(questions(tmp_path)), "chat": False, "max_prompt_tokens": 8},
        "reward": {"functions": [{"function": "tests.vllm.rewards:words"}]},
        "algorithm": {"steps": STEPS, "prompts": 2, "group_size": 2, "max_lag": 0, "optimizer": {"lr": 1e-2}},
        "sampling": {"max_completion_tokens": 5, "temperature": 0.8},
        "placement": {
            "trainers": 2,
            "servers": {
                "vllm": 1,
                "python": os.environ["VLLM_PYTHON"],
                "arguments": ["--enforce-eager", "--max-num-seqs=4"],
            },
        },
        "checkpoint_every": 1,
        "folder": str(tmp_path / "run"),
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    return tmp_path / "config.yaml"


@contextmanager
def penstock(config: Path, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """Run `penstock run`, and kill it when the body ends."""
    command = [sys.executable, "-m", "penstock", "run", str(config), *overrides]
    variables = os.environ | SETTINGS | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=variables, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def until(process: subprocess.Popen[str], word: str, times: int = 1) -> str:
    """Return what a run says until it has said so many lines with `word`."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        times -= word in line
        if not times:
            return said
    raise AssertionError(said)


def steps_in(config: Path) -> list[dict[str, Any]]:
    lines = (config.parent / "run/metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "loss" in line]


def descendants(pid: int) -> Iterator[int]:
    for child in children_of(pid):
        yield child
        yield from descendants(child)


def server_of(process: subprocess.Popen[str]) -> int:
    """Return the process of the server, below the subreaper that has its command too."""
    found = [
        each
        for each in descendants(process.pid)
        if Path(f"/proc/{each}/cmdline").read_bytes().startswith(os.environ["VLLM_PYTHON"].encode())
    ]
    return min(found)


def last_rank_of(process: subprocess.Popen[str]) -> int:
    return max(each for each in children_of(process.pid) if b"\0run\0" in Path(f"/proc/{each}/cmdline").read_bytes())


def test_two_ranks_and_a_server_train_by_one_configuration(run: Path) -> None:
    with penstock(run) as process:
        said, _ = process.communicate()

    assert process.returncode == 0, said
    steps = steps_in(run)
    assert [step["staleness/max"] for step in steps] == [0] * STEPS
    assert max(abs(step["kl"]) for step in steps) < NOISE  # each was sampled with the weights that train


KILLED: dict[str, tuple[Callable[[subprocess.Popen[str]], int], str]] = {
    "the server": (server_of, r"vllm \(pid \d+\) was killed by SIGKILL"),
    "a rank": (last_rank_of, r"rank 1 of 2 was killed by SIGKILL"),
}


@pytest.mark.parametrize("killed", KILLED)
def test_what_is_killed_is_named_and_the_same_command_goes_on(killed: str, run: Path) -> None:
    find, message = KILLED[killed]
    with penstock(run, "algorithm.steps=100000", "placement.restarts=0") as process:
        until(process, "loss", times=2)
        everyone = [*descendants(process.pid)]
        os.kill(find(process), signal.SIGKILL)
        said, _ = process.communicate()
    assert process.returncode == 1, said
    assert re.search(message, said)
    assert not [each for each in everyone if Path(f"/proc/{each}").exists()]

    done = max(int(each.name.removeprefix("step-")) for each in (run.parent / "run/checkpoints").glob("step-*"))
    with penstock(run, f"algorithm.steps={done + 1}") as process:
        said, _ = process.communicate()
    assert process.returncode == 0, said
    assert f"{done + 1} steps in" in said


@pytest.mark.parametrize("trainers", [1, 2])
def test_a_run_whose_server_was_killed_goes_on_with_another(trainers: int, run: Path) -> None:
    with penstock(run, f"placement.trainers={trainers}", "algorithm.steps=100000") as process:
        until(process, "loss", times=2)
        os.kill(killed := server_of(process), signal.SIGKILL)
        said = until(process, "_died")
        until(process, "loss", times=2)
        assert server_of(process) != killed
        process.send_signal(signal.SIGINT)
        process.communicate()

    assert "was killed by SIGKILL" in said
    assert [step["staleness/max"] for step in steps_in(run)][-1] == 0


def test_a_server_that_does_not_start_is_told_with_its_own_words(run: Path) -> None:
    with penstock(run, "placement.trainers=1", "placement.servers.arguments=[--no-such-argument]") as process:
        said, _ = process.communicate()

    assert process.returncode == 1
    assert re.search(r"vllm \(pid \d+\) exited with status 2", said)
    assert "--no-such-argument" in said
