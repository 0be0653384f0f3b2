"""A row of a group as the rollout that ROLL's `TrajEnvManager` would send: columns, names and metrics.

Read off ROLL's roll/pipeline/agentic/env_manager/traj_env_manager.py:306-396 (`formulate_rollouts`) and :134-138. ROLL
pads every sequence to `sequence_length`, keeps the score of an episode on its last token, and computes advantages
itself. Knows no ROLL: the columns are numpy arrays.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...._schemas import Trajectory, TrajectoryGroup
from ...._schemas.batch import oldest_versions


class EnvNames(msgspec.Struct, frozen=True):
    """The numbers that ROLL's scheduler knows an environment by."""

    tag: str
    """The key in `custom_envs`."""
    group_id: int
    """The number of its `GroupQueue`."""
    group_seed: int
    """The seed of the group, drawn anew for each run."""

    def group_of(self, episode_id: int) -> str:
        """Return ROLL's name of the rollouts of one prompt: it normalizes rewards by it."""
        return f"{self.tag}_{self.group_id}_{episode_id}_{self.group_seed}"


def columns_of(row: Trajectory, length: int, pad_id: int) -> dict[str, NDArray[Any]]:
    """Return the tensors of one rollout, padded at the end to `length`: [length], `infer_logprobs` [length − 1].

    `response_mask` is true on the tokens that train, wherever they are; `prompt_mask` on those before the first of
    them. `infer_logprobs[t]` belongs to token t + 1; a row without log-probabilities lacks it, as in ROLL.
    """
    tokens = len(row.tokens)
    columns: dict[str, NDArray[Any]] = {
        "input_ids": np.full(length, pad_id, np.int64),
        "attention_mask": np.zeros(length, np.int64),
        "position_ids": np.zeros(length, np.int64),
        "response_mask": np.zeros(length, np.bool_),
        "prompt_mask": np.zeros(length, np.bool_),
        "scores": np.zeros(length, np.float32),
    }
    columns["input_ids"][:tokens] = row.tokens
    columns["attention_mask"][:tokens] = 1
    columns["position_ids"][:tokens] = np.arange(tokens)
    columns["response_mask"][:tokens] = row.loss_mask
    columns["prompt_mask"][: row.prompt_length] = True
    columns["scores"][tokens - 1] = row.reward
    if row.behavior_logprobs is not None:
        logprobs = np.zeros(length, np.float32)
        logprobs[:tokens] = np.where(row.loss_mask, row.behavior_logprobs, 0)
        columns["infer_logprobs"] = logprobs[1:]
    return columns


def names_of(row: Trajectory, names: EnvNames, episode_id: int, env_id: int) -> dict[str, Any]:
    """Return the values of one rollout that are no tensors."""
    group = names.group_of(episode_id)
    return {
        "env_ids": env_id,
        "group_ids": names.group_id,
        "tags": names.tag,
        "step_scores": turn_scores(row),
        "episode_scores": row.reward,
        "traj_group_id": group,
        "traj_id": f"{group}_{env_id}",
    }


def turn_scores(row: Trajectory) -> list[float]:
    """Return the score of each turn of the policy, where the row knows it; they sum to its reward."""
    begins = np.flatnonzero(np.diff(row.loss_mask.astype(np.int8), prepend=0) == 1)
    if row.token_rewards is None or not len(begins):
        return [row.reward]
    scores: list[float] = np.add.reduceat(row.token_rewards.astype(np.float64), begins).tolist()
    scores[-1] += row.reward - sum(scores)
    return scores


def metrics_of(row: Trajectory, tag: str, parts: dict[str, float]) -> dict[str, float]:
    """Return the metrics of one rollout, under the names that ROLL gives them; `parts` are those of its reward."""
    turns = int(np.count_nonzero(np.diff(row.loss_mask.astype(np.int8), prepend=0) == 1))
    shaped = {f"env/{tag}/rewards/{name}": value for name, value in parts.items()}
    return {f"env/{tag}/num_actions": turns, **shaped, "env/response_length": float(np.count_nonzero(row.loss_mask))}


def reward_parts_of(group: TrajectoryGroup, place: int) -> dict[str, float]:
    """Return the parts of the reward of sequence `place`."""
    return {name: float(part[place]) for name, part in group.reward_parts.items()}


def oldest_version(group: TrajectoryGroup) -> int:
    """Return the oldest policy version in the group: the step of ROLL with the weights that sampled it."""
    return int(oldest_versions(group.policy_versions, group.offsets).min())


def fits(group: TrajectoryGroup, group_size: int, length: int) -> bool:
    """Return whether ROLL can train the group: `group_size` rollouts that train, none longer than `length`."""
    longest = int(np.diff(group.offsets).max(initial=0))
    return len(group) == group_size and longest <= length and all(row.loss_mask.any() for row in group)
