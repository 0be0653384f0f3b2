"""The contract of ROLL that scripts/roll/record_contract.py recorded, and groups of the rollouts in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock import TrajectoryGroup

CONTRACT: dict[str, Any] = json.loads((Path(__file__).parent / "contract.json").read_text())


def group_of(turns: list[dict[str, Any]]) -> TrajectoryGroup:
    """Return a group of one sequence: the rollout that these turns of ROLL are."""
    tokens: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    rewards: list[float] = []
    for turn in turns:
        prompt, response = turn["prompt_ids"], turn["response_ids"]
        tokens += prompt + response
        mask += [0] * len(prompt) + [1] * len(response)
        logprobs += [0.0] * len(prompt) + turn.get("infer_logprobs", [0.0] * len(response))
        rewards += [0.0] * (len(prompt) + len(response) - 1) + [turn["reward"]]
    return TrajectoryGroup.build(
        env="sums",
        instance_id="0",
        sequences=[tokens],
        loss_mask=[mask],
        rewards=[sum(rewards)],
        token_rewards=[rewards],
        behavior_logprobs=[logprobs] if "infer_logprobs" in turns[0] else None,
    )
