"""Environments of Atropos, in an interpreter of their own, in ROLL's pipeline: `make test-atropos-roll` runs this file.

The environments are Atropos' own, out of a checkout, with data sets made here. ROLL's inference worker answers by a
script, or by a tiny model that learns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tests.atropos_roll_real.conftest import ROOT
from tests.failsafe import FAILSAFE_S
from tests.roll_real.pipelines import FLOW, PIPELINE_S, errors_of, logged, pipeline_of, run_pipeline

from penstock._pipeline.accounting.committed_prompts import CommittedPrompts

pytestmark = pytest.mark.timeout(3 * PIPELINE_S)

ENVIRONMENTS = {
    "gsm8k": "gsm8k_server.py:GSM8kEnv",
    "tools": "tool_calling_server.py:SingleToolCallingEnv",
    "turns": "tool_use_multiturn_server.py:MultiTurnToolCallingEnv",
}

REWARD = {
    "format_markers": [{"marker": "<think>", "closing": "</think>", "reward": 0.25}],
    "length_bounty": {"reward": 0.001, "cap": 0.125},
    "clip": [-2, 2],
}

GROUP = 4

SAVED = 2
"""The step after which ROLL writes its first checkpoint."""


def tag_of(environments: Path, name: str, **keys: Any) -> dict[str, Any]:
    """Return the configuration of a tag with an environment of Atropos."""
    return {
        **FLOW,
        "env_type": "penstock",
        "atropos": str(environments / ENVIRONMENTS[name]),
        "python": os.environ["ATROPOS_PYTHON"],
        "env_config": {"max_token_length": 8192},
        "reward": REWARD,
        "max_steps": 1,
        "max_tokens_per_step": 512,
        **keys,
    }


def config_for(environments: Path, *names: str) -> dict[str, Any]:
    """Return options of `config_of` for tags with environments of Atropos, sampled by a script."""
    managers = {
        "tags": list(names),
        "num_env_groups": len(names),
        "num_groups_partition": [1] * len(names),
        "group_size": GROUP,
    }
    return {
        "tag": {},
        "environments": managers,
        "val_env_manager": managers,
        "custom_envs": {name: tag_of(environments, name) for name in names},
        "completion": 512,
        "infer": "tests.atropos_roll_real.scripted.ScriptedWorker",
        "sequence_length": 4096,
        "rollout_batch_size": len(names) * GROUP,
        "val_batch_size": len(names) * GROUP,
    }


def balance_of(output: Path, tag: str) -> dict[str, Any]:
    balance: dict[str, Any] = json.loads((output / "penstock" / tag / "balance.json").read_text())
    return balance


def environments_of(pipeline: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the processes of environments that a pipeline has started."""
    return [
        each
        for each in psutil.Process(pipeline.pid).children(recursive=True)
        if each.cmdline()[:1] == [os.environ["ATROPOS_PYTHON"]]
    ]


def wait_for(condition: Callable[[], bool], pipeline: subprocess.Popen[bytes], output: Path) -> None:
    """Wait for what a running pipeline does."""
    while not condition():
        with suppress(subprocess.TimeoutExpired):
            assert pipeline.wait(0.1) is None, errors_of(output)


def test_environments_of_atropos_are_trained_by_roll_and_one_that_is_killed_is_replaced(
    environments: Path, workspace: Path, tmp_path: Path
) -> None:
    steps = 4
    options = config_for(environments, *ENVIRONMENTS)
    pipeline = pipeline_of(workspace / "tokenizer", tmp_path, cwd=workspace, max_steps=steps, **options)
    wait_for(lambda: len(logged(tmp_path)) >= 1, pipeline, tmp_path)
    processes = environments_of(pipeline)
    loaded = "".join(Path(f"/proc/{each.pid}/maps").read_text() for each in processes)

    for process in processes:
        process.kill()

    assert pipeline.wait(PIPELINE_S) == 0, errors_of(tmp_path)
    assert len(processes) == len(ENVIRONMENTS)
    assert "libnuma" not in loaded
    lines = logged(tmp_path)
    assert len(lines) == steps
    balances = [balance_of(tmp_path, name) for name in ENVIRONMENTS]
    for name, balance in zip(ENVIRONMENTS, balances, strict=True):
        assert balance["ended"]["trained"] > GROUP, name
        assert balance["admitted"] == sum(balance["ended"].values()), name
        assert balance["in_flight"] == 0, name
        parts = {key.rpartition("/")[2] for line in lines for key in line if key.startswith(f"env/{name}/rewards/")}
        assert parts >= {"score", "format_markers", "length_bounty"}, name
    assert sum(balance["ended"]["trained"] for balance in balances) == steps * len(ENVIRONMENTS) * GROUP


def test_if_rolls_trainer_is_killed_nothing_is_left_and_the_run_that_resumes_trains_no_prompt_twice(
    environments: Path, workspace: Path, tmp_path: Path
) -> None:
    options = config_for(environments, "gsm8k")
    pipeline = pipeline_of(workspace / "tokenizer", tmp_path, cwd=workspace, **options)
    # ROLL has a checkpoint of a step, and logs it, before penstock knows that it was trained
    wait_for((tmp_path / f"penstock/gsm8k/{SAVED}.json").is_file, pipeline, tmp_path)
    started = psutil.Process(pipeline.pid).children(recursive=True)
    (trainer,) = [each for each in started if "ray::TrainWorker" in " ".join(each.cmdline())]
    processes = environments_of(pipeline)

    trainer.kill()

    assert pipeline.wait(PIPELINE_S) != 0
    assert "ActorDiedError" in (tmp_path / "errors.txt").read_text()
    assert processes
    assert psutil.wait_procs(processes, FAILSAFE_S)[1] == []

    (checkpoint,) = tmp_path.glob(f"checkpoints/*/checkpoint-{SAVED}")
    resumed = run_pipeline(
        workspace / "tokenizer",
        tmp_path,
        cwd=workspace,
        max_steps=SAVED + 3,
        resume_from_checkpoint=str(checkpoint),
        **options,
    )

    assert [line["step"] for line in resumed] == [SAVED + 1, SAVED + 2]
    saved = json.loads((tmp_path / f"penstock/gsm8k/{SAVED + 2}.json").read_text())
    assert len(CommittedPrompts.of_state(saved["committed"])) == SAVED + 3  # a group a step, each of another prompt
    balance = balance_of(tmp_path, "gsm8k")
    assert balance["ended"]["trained"] == 2 * GROUP
    assert balance["admitted"] == sum(balance["ended"].values())


def test_reward_rises_by_the_configuration_of_the_example(tmp_path: Path) -> None:
    example = ROOT / "examples/atropos_roll"
    subprocess.run([sys.executable, example / "prepare.py", tmp_path], check=True, timeout=PIPELINE_S)
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "tests.atropos_roll_real.table",
        example / "gsm8k.yaml",
        tmp_path,
    ]
    # the library `datasets` knows what another test has loaded as `gsm8k` by that name
    own = os.environ | {"HF_HOME": str(tmp_path / "hub")}
    with (tmp_path / "errors.txt").open("wb") as errors:
        ended = subprocess.run(command, cwd=tmp_path, env=own, stderr=errors, check=False, timeout=PIPELINE_S)

    assert ended.returncode == 0, errors_of(tmp_path)
    rewards = [line["critic/score/mean"] for line in logged(tmp_path)]
    assert np.mean(rewards[-10:]) > np.mean(rewards[:10]) + 0.2
    balance = json.loads((tmp_path / "output/penstock/gsm8k/balance.json").read_text())
    assert balance["ended"]["trained"] == len(rewards) * 32  # rollout_batch_size
    assert balance["admitted"] == sum(balance["ended"].values())
