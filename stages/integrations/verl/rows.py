"""Groups as rows of verl's TransferQueue: one for each sequence with a token that trains.

Read off verl 0.9.1: `AgentLoopOutput.as_dict` (experimental/agent_loop/agent_loop.py:109) and `_agent_loop_postprocess`
(trainer/ppo/v1/agent_loop_tq.py:129). Lengths: P tokens of the prompt, R tokens of the response. It begins with the
first token that trains. Knows no verl, and no torch: columns are numpy arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...._pipeline.errors import InvalidPipeline
from ...._schemas import Trajectory, TrajectoryGroup, TrajectoryId
from ..flow_thread.sampling import check_sampling


class Row(NamedTuple):
    """One trajectory for TransferQueue."""

    trajectory: TrajectoryId
    columns: dict[str, NDArray[Any]]
    """Tensors, [P], [R] or [P + R]. Every array is a copy."""
    values: dict[str, Any]
    """Fields that are no tensors."""
    tag: dict[str, Any]
    """Values that verl's replay buffer and its metrics read without the tensors."""


class Needs(NamedTuple):
    """The columns that verl's configuration asks for."""

    temperature: float | None = None
    """That of the trainer; None if unknown."""
    logprobs: bool = True
    """True if the trainer reads log-probabilities of the sampling."""
    advantages: bool = False
    """True if the trainer takes the flow's advantages."""


def rows_of(group: TrajectoryGroup, needs: Needs) -> list[Row]:
    """Return a row for each sequence that trains.

    Raises:
        InvalidPipeline: the group lacks a column that verl's configuration asks for.
        InvalidRecord: it was sampled at another temperature.
    """
    if needs.logprobs and group.behavior_logprobs is None:
        raise InvalidPipeline(
            "verl: expected groups with log-probabilities, got none: sample with a policy that has them, or set "
            "actor_rollout_ref.rollout.calculate_log_probs=False"
        )
    if needs.advantages and group.advantages is None:
        raise InvalidPipeline(
            "verl: expected groups with advantages for algorithm.adv_estimator=penstock, got none: add "
            '.then(AdvantageNormalizer("grpo")), or let verl compute them (adv_estimator=grpo)'
        )
    check_sampling(group, needs.temperature, "verl")
    return list(_rows(group, needs))


def _rows(group: TrajectoryGroup, needs: Needs) -> Iterator[Row]:
    for place, row in enumerate(group):
        if not row.loss_mask.any():
            continue
        parts = {name: float(part[place]) for name, part in group.reward_parts.items()}
        versions = {
            "min_global_steps": int(row.policy_versions.min()),
            "max_global_steps": int(row.policy_versions.max()),
        }
        columns = _columns(row, needs)
        values = {
            "num_turns": 2 * _turns(row.loss_mask),
            "metrics": {},
            "multi_modal_inputs": {},
            "extra_fields": {
                **versions,
                "turn_scores": [],
                "tool_rewards": [],
                "reward_extra_info": parts,
                "stop_reason": row.stop_reason.name.lower(),
                "trajectory": [row.id.env, row.id.instance_id, row.id.repetition_id],
            },
        }
        prompt_len, seq_len = row.prompt_length, len(row.tokens)
        lengths = {"prompt_len": prompt_len, "response_len": seq_len - prompt_len, "seq_len": seq_len}
        yield Row(row.id, columns, values, {"status": "success", **lengths, **versions})


def _columns(row: Trajectory, needs: Needs) -> dict[str, NDArray[Any]]:
    start = row.prompt_length
    tokens, mask = row.tokens.astype(np.int64), row.loss_mask[start:].astype(np.int64)
    columns: dict[str, NDArray[Any]] = {
        "prompts": tokens[:start].copy(),
        "responses": tokens[start:].copy(),
        "response_mask": mask,
        "loss_mask": mask.copy(),
        "input_ids": tokens,
        "position_ids": np.arange(len(tokens)),
        "rm_scores": _scores(row),
    }
    if row.behavior_logprobs is not None:
        columns["rollout_log_probs"] = row.behavior_logprobs[start:].astype(np.float32)
    if needs.advantages and row.advantages is not None:
        columns["advantages"] = row.advantages[start:].astype(np.float32)
    return columns


def _scores(row: Trajectory) -> NDArray[np.float32]:
    """Return [R] the score of each token: its own one, and the rest of the reward on the last token."""
    scores = np.zeros(len(row.tokens) - row.prompt_length, np.float32)
    if row.token_rewards is not None:
        scores += row.token_rewards[row.prompt_length :]
    scores[-1] += row.reward - float(scores.sum())
    return scores


def _turns(mask: NDArray[np.bool_]) -> int:
    """Return how often the policy began to sample."""
    return int(np.count_nonzero(mask[1:] & ~mask[:-1]))
