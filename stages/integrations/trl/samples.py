"""Groups as the samples of TRL's asynchronous trainer: one for each sequence with a token that trains.

TRL's `RolloutSample` has one advantage a sequence, one policy version a sequence, and log-probabilities that its
trainer compares with those at its own temperature. A group that does not fit into that is refused. Knows no TRL: the
fields are a dict.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...._pipeline.errors import InvalidPipeline
from ...._schemas import InvalidRecord, Trajectory, TrajectoryGroup, TrajectoryId
from ...._schemas.batch import oldest_versions
from ..flow_thread.flow_run import Decode, Drop
from ..flow_thread.sampling import check_sampling

FIELDS = (
    *("prompt", "completion", "input_ids", "completion_mask", "old_log_probs"),
    *("advantage", "model_version", "group_id", "metrics", "enqueued_at"),
)
"""The fields of TRL's RolloutSample that are filled in."""


class SampleBounds(NamedTuple):
    """TRL's bounds on samples, of its configuration: it drops others."""

    max_staleness: int
    token_budget: int = 0
    """Tokens of a row; 0 or less for no bound."""

    def drop(self, sample: Any, version: int) -> Drop | None:
        """Return the reason that TRL with weights of `version` drops `sample` when it takes it; None if it does not.

        In the order of its `RolloutQueueDataset` and its `TokenBudgetBatcher`.
        """
        if version - sample.model_version > self.max_staleness:
            return Drop("stale", f"dropped by TRL: older than max_staleness={self.max_staleness}")
        if 0 < self.token_budget < len(sample.input_ids):
            return Drop("rejected", f"dropped by TRL: longer than token_budget={self.token_budget}")
        return None


def samples_of(
    group: TrajectoryGroup, group_id: int, *, decode: Decode | None = None, temperature: float | None = None
) -> Iterator[tuple[TrajectoryId, dict[str, Any]]]:
    """Yield the fields of a sample for each sequence that trains, all but `enqueued_at`. Every array is a copy.

    Args:
        group: with advantages and log-probabilities.
        group_id: TRL's number of the group.
        decode: tokens to text, for the messages that TRL shows; None leaves them empty.
        temperature: that of the trainer; None if unknown.

    Raises:
        InvalidPipeline: the group has no advantages or no log-probabilities.
        InvalidRecord: advantages differ within a sequence, or it was sampled at another temperature than `temperature`.
    """
    if group.advantages is None:
        raise InvalidPipeline('TRL: expected groups with advantages, got none: add .then(AdvantageNormalizer("grpo"))')
    check(group, temperature)
    versions = oldest_versions(group.policy_versions, group.offsets)
    deviation = float(np.std(group.rewards, dtype=np.float64))
    for place, row in enumerate(group):
        if not row.loss_mask.any():
            continue
        parts = {f"rewards/{name}": float(part[place]) for name, part in group.reward_parts.items()}
        prompt, completion = row.tokens[: row.prompt_length], row.tokens[row.prompt_length :]
        yield (
            row.id,
            {
                "prompt": _messages("user", prompt.tolist(), decode),
                "completion": _messages("assistant", completion.tolist(), decode),
                "input_ids": row.tokens.astype(np.int64),
                "completion_mask": row.loss_mask.astype(np.int64),
                "old_log_probs": np.array(row.behavior_logprobs, np.float32),
                "advantage": _advantage(row),
                "model_version": int(versions[place]),
                "group_id": group_id,
                "metrics": {"reward": row.reward, "reward_std": deviation, **parts},
            },
        )


def check(group: TrajectoryGroup, temperature: float | None) -> None:
    """Check that the group has log-probabilities, and at the trainer's temperature.

    Raises:
        InvalidPipeline: it has none.
        InvalidRecord: it was sampled at another temperature, or has branches.
    """
    if group.behavior_logprobs is None:
        raise InvalidPipeline(
            "TRL: expected groups with log-probabilities, got none: sample with a policy that has them"
        )
    check_sampling(group, temperature, "TRL")


def _advantage(row: Trajectory) -> float:
    """Return the advantage of all tokens that train."""
    assert row.advantages is not None  # noqa: S101 (checked for the group)
    advantages = row.advantages[row.loss_mask]
    if advantages.min() != advantages.max():
        raise InvalidRecord(
            f"{row.id}: expected one advantage for all tokens of a sequence, because TRL has one a sample, got "
            f"{advantages.min()} to {advantages.max()}"
        )
    return float(advantages[0])


def _messages(role: str, tokens: Sequence[int], decode: Decode | None) -> list[dict[str, str]]:
    return [] if decode is None else [{"role": role, "content": decode(tokens)}]
