"""The reward bridge on an episode of ROLL's `TrajEnvManager`, turn by turn in its history.

The correction is added to the reward of the last turn, before ROLL makes a rollout of the history: the sum of the turns
stays the score of the episode. Knows no ROLL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import anyio

from ...._pipeline.errors import RewardFunctionFailed
from ...._pipeline.testing.drive import drive
from ...._schemas import TrajectoryGroup
from ...contracts.policies import Tokenizer
from ...rewards.reward_bridge import RewardBridge
from .gem_environment import META


def shape(history: Sequence[dict[str, Any]], tag: str, bridge: RewardBridge, tokenizer: Tokenizer) -> None:
    """Shape the reward of an episode, and add its parts to the metrics of the last turn.

    Functions get the messages that ROLL sent first, and the row of a data set; they are opened for each episode.

    Args:
        history: of ROLL's RolloutCache. One without a response stays as it is.
        tag: the key in `custom_envs`, the name of the environment.
        bridge: shapes the reward.
        tokenizer: makes text of the responses.

    Raises:
        RewardFunctionFailed: a function failed, and has no value for that.
    """
    turns = [turn for turn in history if "response_ids" in turn]
    if not turns:
        return
    group = group_of(turns, tag)
    driven = anyio.run(partial(drive, bridge, [group], tokenizer=tokenizer))
    if not driven:
        reasons = driven.ledger.balance().reasons
        raise RewardFunctionFailed(f"ROLL, {tag}: expected a reward, got none: {reasons}")
    (shaped,) = driven
    turns[-1]["reward"] += float(shaped.rewards[0]) - float(group.rewards[0])
    parts = {f"rewards/{name}": float(part[0]) for name, part in shaped.reward_parts.items()}
    turns[-1]["metrics"] = {**turns[-1].get("metrics", {}), **parts}


def group_of(turns: Sequence[Mapping[str, Any]], tag: str) -> TrajectoryGroup:
    """Return the episode as a group of one sequence."""
    sequence: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    for turn in turns:
        prompt, response = list(turn["prompt_ids"]), list(turn["response_ids"])
        sequence += prompt + response
        mask += [0] * len(prompt) + [1] * len(response)
        logprobs += [0.0] * len(prompt) + list(turn.get("infer_logprobs", [0.0] * len(response)))
    asked = [message for message in turns[0].get("messages") or () if message["role"] != "assistant"]
    return TrajectoryGroup.build(
        env=tag,
        instance_id="0",
        sequences=[sequence],
        loss_mask=[mask],
        rewards=[sum(turn["reward"] for turn in turns)],
        behavior_logprobs=[logprobs],
        meta={"messages": asked, **turns[0].get(META, {})},
    )
