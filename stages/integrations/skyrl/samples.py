"""Trajectories as the columns of SkyRL's `GeneratorOutput`: a row for each that it asked for, in the order of its rows.

Read off skyrl 0.4.0: train/generators/base.py:46-81 (the keys) and train/utils/trainer_utils.py:673-767 (the
validation). Knows no SkyRL: the output is a dict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...._pipeline.errors import InvalidPipeline
from ...._schemas import InvalidRecord, StopReason
from ..flow_thread.sample_queue import Trajectories
from .requests import PromptRequest, SampledRepetition

KEYS = (
    *("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_metrics"),
    *("rollout_logprobs", "trajectory_ids", "trajectory_generation_times", "trajectory_time_splits"),
    *("rollout_expert_indices", "rollout_sample_support", "is_last_step", "env_metrics"),
    *("pixel_values", "image_grid_thw"),
)
"""The keys of a GeneratorOutput."""


class Rules(NamedTuple):
    """Requirements of SkyRL's configuration for its generator."""

    logprobs: bool = True
    """`sampling_params.logprobs` is not None."""
    zero_reward_on_non_stop: bool = False
    apply_overlong_filtering: bool = False


class Asked(NamedTuple):
    """One row of SkyRL's input."""

    request: PromptRequest
    repetition: int

    @property
    def row(self) -> SampledRepetition | None:
        """The repetition; None if it was given up."""
        return self.request.rows[self.repetition]

    @property
    def ids(self) -> Trajectories:
        """The id of its trajectory; empty if it was given up."""
        return () if self.row is None else (self.row.trajectory.id,)


def columns_of(asked: Sequence[Asked], rules: Rules, filler: int) -> dict[str, Any]:
    """Return the output of these rows, all keys but `rollout_metrics` and `trajectory_ids`.

    A repetition that was given up has a row that does not train: `filler` as its response, and the mean reward of the
    others of its prompt, so that their mean stays.

    Raises:
        InvalidPipeline: SkyRL wants log-probabilities, and a trajectory has none.
        InvalidRecord: some trajectories have rewards for tokens, and others have none.
    """
    rows = [_untrained(each, filler) if each.row is None else _columns(each.request, each.row, rules) for each in asked]
    if len({isinstance(row["rewards"], list) for row, each in zip(rows, asked, strict=True) if each.row}) > 1:
        raise InvalidRecord("expected token_rewards in all groups, or in none, got some with and some without")
    if any(isinstance(row["rewards"], list) for row in rows):
        for row in rows:
            row["rewards"] = row["rewards"] if isinstance(row["rewards"], list) else [row["rewards"]]
    columns: dict[str, Any] = dict.fromkeys(KEYS)
    for name in ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons", "env_metrics"):
        columns[name] = [row[name] for row in rows]
    if rules.logprobs:
        columns["rollout_logprobs"] = [row["rollout_logprobs"] for row in rows]
    return columns


def metrics_of(asked: Sequence[Asked], version: int) -> dict[str, float]:
    """Return metrics of rows that are given at `version`.

    A lag is the optimizer steps between the weights that sampled a row and `version`. From the metrics' names SkyRL
    knows how to merge those of several groups (generators/utils.py).
    """
    lags = [version - int(each.row.trajectory.policy_versions.min()) for each in asked if each.row is not None]
    found = {"generate/lag_mean": float(np.mean(lags)), "generate/lag_max": float(max(lags))} if lags else {}
    return found | {
        "generate/resampled": float(sum(request.resampled for request in {each.request for each in asked})),
        "generate/given_up": float(len(asked) - len(lags)),
    }


def _columns(request: PromptRequest, row: SampledRepetition, rules: Rules) -> dict[str, Any]:
    trajectory = row.trajectory
    start = _prompt_length(row, request)
    masks: list[int] = trajectory.loss_mask[start:].astype(int).tolist()
    rewards: Any = trajectory.reward
    if trajectory.token_rewards is not None:
        rewards = trajectory.token_rewards[start:].tolist()
    if rules.logprobs and trajectory.behavior_logprobs is None:
        raise InvalidPipeline(
            "SkyRL: expected groups with log-probabilities, for generator.sampling_params.logprobs is set, got none: "
            "sample with a policy that has them"
        )
    whole = trajectory.stop_reason == StopReason.STOP
    if rules.zero_reward_on_non_stop and not whole:
        rewards = [0.0] * len(masks) if isinstance(rewards, list) else 0.0
    if rules.apply_overlong_filtering and not whole:
        masks = [0] * len(masks)
    return {
        "prompt_token_ids": trajectory.tokens[:start].tolist(),
        "response_ids": trajectory.tokens[start:].tolist(),
        "rewards": rewards,
        "loss_masks": masks,
        "stop_reasons": trajectory.stop_reason.name.lower(),
        "rollout_logprobs": None
        if trajectory.behavior_logprobs is None
        else trajectory.behavior_logprobs[start:].tolist(),
        "env_metrics": dict(row.parts),
    }


def _prompt_length(row: SampledRepetition, request: PromptRequest) -> int:
    """Return the tokens before the response. That is never empty: SkyRL's trainer would fail at an empty one.

    1. SkyRL's prompt, if there is one and the trajectory begins with it.
    2. That of the environment: all tokens before the first one that trains.
    3. If none trains, because a stage has masked them all, all tokens but the last.
    """
    tokens, asked = row.trajectory.tokens, request.prompt
    if 0 < len(asked) < len(tokens) and np.array_equal(tokens[: len(asked)], asked):
        return len(asked)
    return min(row.trajectory.prompt_length, len(tokens) - 1)


def _untrained(asked: Asked, filler: int) -> dict[str, Any]:
    others = [row.trajectory.reward for row in asked.request.rows.values() if row is not None]
    return {
        "prompt_token_ids": asked.request.prompt.tolist(),
        "response_ids": [filler],
        "rewards": float(np.mean(others)) if others else 0.0,
        "loss_masks": [0],
        "stop_reasons": StopReason.ERROR.name.lower(),
        "rollout_logprobs": [0.0],
        "env_metrics": {},
    }
