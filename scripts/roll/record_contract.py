"""Record what ROLL's own env manager makes of rollouts, for the tests that run without ROLL.

python scripts/roll/record_contract.py <checkout of ROLL> tests/roll/contract.json, with the packages of
scripts/roll/requirements.txt and that checkout on the path. `make test-roll` compares the file with ROLL again.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

LENGTH = 12
PAD = 99

TURNS: dict[str, list[dict[str, Any]]] = {
    "one turn": [{"prompt_ids": [5, 6, 7], "response_ids": [8, 9], "infer_logprobs": [-0.5, -1.5], "reward": 1.0}],
    "three turns": [
        {"prompt_ids": [5, 6], "response_ids": [8], "infer_logprobs": [-0.25], "reward": 0.25},
        {"prompt_ids": [3, 4], "response_ids": [9, 1], "infer_logprobs": [-0.5, -0.75], "reward": 0.5},
        {"prompt_ids": [2], "response_ids": [7], "infer_logprobs": [-2.0], "reward": -1.0},
    ],
    "as long as a sequence may be": [
        {"prompt_ids": [1, 2], "response_ids": list(range(10)), "infer_logprobs": [-0.1] * 10, "reward": 0.0}
    ],
    "without log-probabilities": [{"prompt_ids": [5], "response_ids": [6, 7], "reward": 2.0}],
}
"""Rollouts, turn by turn, as ROLL's env manager keeps them."""


def formulated(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what ROLL's `TrajEnvManager.formulate_rollouts` makes of a rollout, as JSON values."""
    managers = "roll.pipeline.agentic.env_manager"
    env_manager = import_module(f"{managers}.traj_env_manager").TrajEnvManager
    manager = env_manager.__new__(env_manager)
    manager.pipeline_config = SimpleNamespace(sequence_length=LENGTH)
    manager.tokenizer = SimpleNamespace(pad_token_id=PAD)
    history = [{"messages": [], **turn} for turn in turns]
    cache = import_module(f"{managers}.base_env_manager").RolloutCache
    manager.rollout_cache = cache(env_id=6, group_id=1, tag="sums", history=history, step=len(turns))
    rollout = manager.formulate_rollouts(manager.rollout_cache)
    return {
        "tensors": {
            name: {"dtype": str(rollout.batch[name].dtype), "values": rollout.batch[name].tolist()}
            for name in sorted(rollout.batch.keys())
        },
        "values": {name: np.asarray(value).tolist() for name, value in sorted(rollout.non_tensor_batch.items())},
        "metrics": rollout.meta_info["metrics"],
    }


def interfaces() -> dict[str, list[str]]:
    """Return the arguments of what penstock calls, or ROLL calls of penstock's."""
    base = import_module("roll.pipeline.agentic.env_manager.base_env_manager").BaseEnvManager
    scheduler = import_module("roll.distributed.scheduler.rollout_scheduler")
    manager = scheduler.GroupQueueManager.__ray_metadata__.modified_class
    called = {
        "GroupQueueManager": [manager.put, manager.get_episode_id],
        "BaseEnvManager": [base.run_rollout_loop, base.update_step, base.stop],
    }
    return {
        f"{name}.{function.__name__}": [
            argument for argument in list(inspect.signature(function).parameters)[1:] if argument != "_ray_trace_ctx"
        ]
        for name, functions in called.items()
        for function in functions
    }


def contract() -> dict[str, Any]:
    """Return what is recorded, but the commit."""
    return {
        "length": LENGTH,
        "pad": PAD,
        "rollouts": [{"name": name, "turns": turns, "formulated": formulated(turns)} for name, turns in TURNS.items()],
        "interfaces": interfaces(),
    }


if __name__ == "__main__":
    checkout, to = sys.argv[1:]
    asked = ["git", "-C", checkout, "rev-parse", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    recorded = {"commit": commit, **contract()}
    Path(to).write_text(json.dumps(recorded) + "\n")
