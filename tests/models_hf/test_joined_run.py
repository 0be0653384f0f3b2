"""A configured run whose samplers join: the commands, on one host, with the weights over tcp."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests import configured_run
from tests.failsafe import FAILSAFE_S

from penstock._stages.training_run.train import sampler_program
from penstock.runs import load_run_config

COMMAND = [sys.executable, "-c", "from penstock._cli.app import main; main()"]


@pytest.fixture
def urls() -> tuple[str, str]:
    """Two free ports: workers must know the first before the run listens."""
    with socket.socket() as first, socket.socket() as second:
        for probe in (first, second):
            probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{first.getsockname()[1]}", f"tcp://127.0.0.1:{second.getsockname()[1]}"


@pytest.fixture
def config(tmp_path: Path, urls: tuple[str, str]) -> Path:
    return configured_run.write_run(
        tmp_path, {"joining": {"url": urls[0], "weights": urls[1], "key": str(tmp_path / "run.key")}}
    )


@contextmanager
def started(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    with subprocess.Popen([*COMMAND, *arguments], env=environment, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.long
def test_a_configured_run_trains_what_a_worker_that_joins_samples(
    config: Path, urls: tuple[str, str], tmp_path: Path
) -> None:
    keys = ["algorithm.max_lag=0", "data.evaluation=4", "samples.count=1"]
    join = ["worker", "--join", urls[0], "--key", str(tmp_path / "run.key"), str(config), *keys]

    with started("run", str(config), *keys) as run, started(*join) as worker:
        codes = [process.wait(FAILSAFE_S) for process in (run, worker)]

    assert codes == [0, 0]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == configured_run.STEPS
    assert summary["ledger"]["ended"]["trained"] == configured_run.STEPS * configured_run.TRAJECTORIES
    assert summary["ledger"]["ended"]["stale"] == 0  # the weights of every step arrived before it was sampled for
    assert summary["ledger"]["in_flight"] == 0
    samples = map(json.loads, (tmp_path / "run" / "samples.jsonl").read_text().splitlines())
    evaluated = [(sample["evaluated"], sample["kind"]) for sample in samples if sample["evaluated"] is not None]
    assert evaluated == [(step, kind) for step in (0, configured_run.STEPS) for kind in ("best", "worst")]
    changed = load_file(Path(summary["checkpoint"]) / "model.safetensors")
    initial = load_file(tmp_path / "model" / "model.safetensors")
    assert any((changed[name] != initial[name]).any() for name in initial)


def test_a_worker_of_another_configuration_is_told_by_its_digest_and_so_is_refused(config: Path) -> None:
    program, same, other = (sampler_program(load_run_config(config, keys)) for keys in ([], [], ["seed=7"]))

    assert program.digest == same.digest != other.digest
