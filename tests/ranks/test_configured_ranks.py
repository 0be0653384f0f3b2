"""`placement.trainers`: one configuration trains on several ranks, which end together and go on from a checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import yaml
from safetensors.torch import load_file
from tests.command_line import ran
from tests.configured_run import TRAJECTORIES, write_run
from tests.failsafe import FAILSAFE_S
from tests.processes.children import children_of

from penstock.errors import InvalidConfig
from penstock.runs import load_run_config, train

ROOT = Path(__file__).parent.parent.parent

SYNCHRONOUS = ["algorithm.max_lag=0", "algorithm.steps=1", "placement.samplers=1"]


@contextmanager
def run_on_ranks(config: Path, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """Run `penstock run` with two ranks, and kill it when the body ends."""
    command = [sys.executable, "-m", "penstock", "run", str(config), "placement.trainers=2", *overrides]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def printed(process: subprocess.Popen[str]) -> str:
    """Return what a process prints until it ends."""
    said, _ = process.communicate(timeout=FAILSAFE_S)
    return said


def weights_in(run: Path) -> dict[str, torch.Tensor]:
    *_, newest = sorted((run / "checkpoints").glob("step-*"))
    return load_file(newest / "model.safetensors")


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """Return the processes of the ranks, which are started in their order."""
    return [
        each for each in sorted(children_of(process.pid)) if b"\0run\0" in Path(f"/proc/{each}/cmdline").read_bytes()
    ]


@pytest.mark.parametrize("values", [[], ["algorithm.advantages=gae"]], ids=["a policy", "and a critic"])
def test_two_ranks_train_as_one_process_does(values: list[str], tmp_path: Path) -> None:
    config = write_run(tmp_path, {})
    status, said = ran("run", config, *SYNCHRONOUS, *values, f"folder={tmp_path / 'alone'}")
    assert not status, said

    with run_on_ranks(config, *SYNCHRONOUS, *values) as process:
        said = printed(process)

    assert process.returncode == 0, said
    assert said.count("1 steps in") == 1
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["ledger"]["ended"]["trained"] == TRAJECTORIES
    alone, ranked = weights_in(tmp_path / "alone"), weights_in(tmp_path / "run")
    for name, tensor in alone.items():
        torch.testing.assert_close(ranked[name], tensor, atol=1e-5, rtol=0)
    described = [log_ratios_of(tmp_path / folder) for folder in ("alone", "run")]
    assert described[0]
    assert described[1] == pytest.approx(described[0], abs=1e-4)


def log_ratios_of(run: Path) -> list[float]:
    """Return the log-ratio of every token that trained of the samples of a step, in their order."""
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    trained = [each for each in samples if each["evaluated"] is None]
    return [ratio for each in trained for ratio in each["tokens"]["log_ratios"]]


def test_a_model_that_fits_no_rank_is_sharded_and_trained_as_by_one_process(tmp_path: Path) -> None:
    """Memory for 28 bytes a parameter: two whole models, with moments and versions, need 40, and two halves 24."""
    config = write_run(tmp_path, {"trainers": 2, "samplers": 1})
    values = yaml.safe_load(config.read_text())
    values["algorithm"] |= {"max_lag": 0, "steps": 1}
    config.write_text(yaml.safe_dump(values))
    status, said = ran("run", config, "placement.trainers=1", f"folder={tmp_path / 'alone'}")
    assert not status, said
    alone = weights_in(tmp_path / "alone")
    parameters = sum(tensor.numel() for tensor in alone.values())

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    script = ["tests.ranks.script_of_a_sharded_run", str(config), str(28 * parameters)]
    sharded = subprocess.run([*torchrun, *script], capture_output=True, text=True, check=False, cwd=ROOT)

    assert sharded.returncode == 0, sharded.stderr
    parts = [int((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
    assert sum(parts) == parameters
    assert max(parts) < 0.6 * parameters
    for name, tensor in weights_in(tmp_path / "run").items():
        torch.testing.assert_close(tensor, alone[name], atol=1e-5, rtol=0)


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_all_and_the_same_command_goes_on_from_the_checkpoint(rank: int, tmp_path: Path) -> None:
    config = write_run(tmp_path, {})
    checkpoints = tmp_path / "run/checkpoints"
    with run_on_ranks(config, "algorithm.steps=100000", "checkpoint_every=1", "placement.restarts=0") as process:
        until_saved(process)
        ranks = ranks_of(process)
        assert len(ranks) == 2
        os.kill(ranks[rank], signal.SIGKILL)
        said = printed(process)
    assert process.returncode == 1
    assert f"rank {rank} of 2 was killed by SIGKILL: run the command again" in said
    assert not any(Path(f"/proc/{each}").exists() for each in ranks)

    done = int(max(each.name for each in checkpoints.glob("step-*")).removeprefix("step-"))
    with run_on_ranks(config, f"algorithm.steps={done + 1}", "checkpoint_every=1") as process:
        said = printed(process)

    assert process.returncode == 0, said
    assert f"{done + 1} steps in" in said


def until(process: subprocess.Popen[str], *words: str, times: int = 1) -> str:
    """Return what a run says until it has said lines with all `words` so many times."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        times -= all(word in line for word in words)
        if not times:
            return said
    raise AssertionError(said)


def until_saved(process: subprocess.Popen[str]) -> str:
    """Return what a run says until it has a checkpoint: that of a step is written before the next one ends."""
    return until(process, "step ", "loss", times=2)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long)])
def test_all_ranks_go_on_after_one_was_killed(rank: int, tmp_path: Path) -> None:
    config = write_run(tmp_path, {})
    with run_on_ranks(config, "algorithm.steps=100000", "checkpoint_every=1") as process:
        until_saved(process)
        killed = ranks_of(process)
        os.kill(killed[rank], signal.SIGKILL)
        said = until(process, "rank_died")
        until_saved(process)
        others = ranks_of(process)
        process.send_signal(signal.SIGINT)
        printed(process)

    assert f"rank {rank} of 2 was killed by SIGKILL" in said
    assert len({*killed, *others}) == 4


@pytest.mark.long
def test_ranks_that_die_more_often_than_restarts_permits_end_the_run(tmp_path: Path) -> None:
    config, rank = write_run(tmp_path, {}), 1
    with run_on_ranks(config, "algorithm.steps=100000", "checkpoint_every=1", "placement.restarts=1") as process:
        until_saved(process)
        first = ranks_of(process)
        os.kill(first[rank], signal.SIGKILL)
        said = until(process, "rank_died") + until_saved(process)
        second = ranks_of(process)
        os.kill(second[rank], signal.SIGKILL)
        said += printed(process)

    assert len({*first, *second}) == 4
    assert process.returncode == 1
    assert f"rank {rank} of 2 was killed by SIGKILL: run the command again" in said
    assert not any(Path(f"/proc/{each}").exists() for each in [*first, *second])


MISTAKES: dict[str, tuple[dict[str, str], str]] = {
    "no torchrun": ({}, "placement.trainers: expected 2 ranks, got one process: start them by `penstock run`, or by"),
    "a torchrun of four": (
        {"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "RANK": "0"},
        "placement.trainers: expected 4, as torchrun has ranks, got 2",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_ranks_that_are_not_those_of_the_configuration_are_refused(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables, message = MISTAKES[mistake]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config: Any = load_run_config(write_run(tmp_path, {"trainers": 2}))

    with pytest.raises(InvalidConfig, match=message):
        anyio.run(partial(train, config, view=None))


ANOTHER = """
import os, sys
from functools import partial
import anyio
from penstock.runs import load_run_config, train
config = load_run_config(sys.argv[1], ["seed=" + os.environ["RANK"]])
anyio.run(partial(train, config, view=None))
"""


@pytest.mark.long
def test_ranks_with_other_values_are_refused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ANOTHER)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    arguments = [str(tmp_path / "script.py"), str(write_run(tmp_path, {"trainers": 2}))]

    refused = subprocess.run([*torchrun, *arguments], capture_output=True, text=True, check=False, cwd=ROOT)

    assert "expected one configuration on all ranks, got another one on rank 1" in refused.stderr


def test_a_mistake_is_told_once_before_the_ranks_begin(tmp_path: Path) -> None:
    config = write_run(tmp_path, {"trainers": 2})

    status, said = ran("run", config, "model.path=elsewhere")

    assert status == 1
    assert said.count("expected the folder of a model at elsewhere") == 1


def test_a_device_beside_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"device: expected none, or cpu, beside trainers, .* got cuda:1"):
        load_run_config(write_run(tmp_path, {"trainers": 2, "device": "cuda:1"}))
