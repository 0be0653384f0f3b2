"""A run is killed by SIGKILL and started again in its folder: its results are those of an uninterrupted run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from tests.resumption.script_of_a_run import DEATHS, STEPS

ROOT = Path(__file__).parent.parent.parent
OBSERVED_BY_WORKERS = ("rollout/", "reward_std")
"""Arrives when it arrives, and means over what arrived may differ in the last bit."""

RUNS_WITH_WORKERS = ("alone", "whole", "sampler", "trainer")

BY_THE_CLOCK = ("timing_s/", "perf/throughput", "perf/time_per_step")


def made_by(script: str, folder: Path, *arguments: str) -> Path:
    """Return `folder` with the runs of `script`."""
    command = [sys.executable, "-m", f"tests.resumption.{script}", str(folder), *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with all runs of one process."""
    return made_by("script_of_a_run", tmp_path_factory.mktemp("runs"))


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of each line that do not depend on the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(BY_THE_CLOCK)} for line in lines]


def weights_of(folder: Path) -> dict[str, bytes]:
    return weights_of_step(folder, STEPS)


def weights_of_step(folder: Path, step: int) -> dict[str, bytes]:
    loaded = load_file(folder / "checkpoints" / f"step-{step:08d}" / "model.safetensors")
    return {name: array.tobytes() for name, array in loaded.items()}


def test_the_run_is_worth_comparing(runs: Path) -> None:
    metrics = metrics_of(runs / "whole")

    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    assert len({line["loss"] for line in metrics}) == STEPS
    assert all(line["staleness/max"] == 0 for line in metrics)
    assert any("dropped/filtered" in line for line in metrics)


@pytest.mark.parametrize(("moment", "nth"), DEATHS)
def test_a_killed_run_that_is_started_again_comes_to_the_same_bit_for_bit(runs: Path, moment: str, nth: int) -> None:
    resumed = runs / f"{moment}-{nth}"

    assert metrics_of(resumed) == metrics_of(runs / "whole")
    assert weights_of(resumed) == weights_of(runs / "whole")


@pytest.mark.long
def test_the_weights_do_not_depend_on_the_number_of_samplers_nor_on_what_is_killed(tmp_path: Path) -> None:
    runs = made_by("script_of_workers", tmp_path)

    alone, *others = ([trained(line) for line in metrics_of(runs / name)] for name in RUNS_WITH_WORKERS)
    assert (runs / "a worker was killed").exists()
    assert [line["step"] for line in alone] == list(range(1, STEPS + 1))
    assert len({line["grad_norm"] for line in alone}) == STEPS
    assert all(each == alone for each in others)
    assert all(weights_of(runs / name) == weights_of(runs / "alone") for name in RUNS_WITH_WORKERS)


def trained(line: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics of a step that do not depend on time."""
    return {name: value for name, value in line.items() if not name.startswith(OBSERVED_BY_WORKERS)}


@pytest.mark.long
@pytest.mark.parametrize("killed", ["trainer", "workers"])
def test_a_run_of_agents_with_branches_comes_to_the_same_bit_for_bit_whatever_is_killed(
    killed: str, tmp_path: Path
) -> None:
    runs = made_by("script_of_agents", tmp_path, killed)

    assert all(line["rollout/branches"] == 2.5 for line in metrics_of(runs / "whole"))
    whole, other = ([trained(line) for line in metrics_of(runs / name)] for name in ("whole", killed))
    assert [line["step"] for line in whole] == list(range(1, STEPS + 1))
    assert len({line["grad_norm"] for line in whole}) == STEPS
    assert other == whole
    assert weights_of(runs / killed) == weights_of(runs / "whole")
