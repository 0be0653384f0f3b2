"""The token columns of finished rollouts: tokens, loss mask, versions of the weights, log-probabilities, token rewards.

Knows no environment and no policy, only their turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..._schemas import InvalidRecord
from ..contracts.policies import Completion
from ..contracts.rollouts import Branch, RolloutResult, Turn, tokens_of
from .rollout_routes import routed_experts


def columns_of(sequences: Sequence[Branch], *, turn_rewards: bool = False, support: int = 0) -> dict[str, Any]:
    """Return the token columns of `sequences`; loss and logprobs are on sampled tokens only.

    Args:
        sequences: each with at least one sampled token.
        turn_rewards: whether `token_rewards` is one of the columns.
        support: width of the column `support_ids`, 0 for none.

    Raises:
        InvalidRecord: a sequence lacks `turn_rewards`, or a turn has a support that is wider.
    """
    turns = [turn for sequence in sequences for turn in sequence.turns]
    lengths = np.array([len(tokens_of(turn)) for turn in turns])
    turn_ends = np.cumsum([0, *(len(sequence.turns) for sequence in sequences)])
    offsets = np.concatenate([[0], np.cumsum(lengths)])[turn_ends]
    loss_mask = np.repeat([isinstance(turn, Completion) for turn in turns], lengths)
    columns = {
        "tokens": np.concatenate([tokens_of(turn) for turn in turns]),
        "offsets": offsets,
        "loss_mask": loss_mask,
        "policy_versions": _versions(turns, loss_mask, offsets),
    }
    if all(turn.logprobs is not None for turn in turns if isinstance(turn, Completion)):
        columns["behavior_logprobs"] = np.concatenate([_logprobs_of(turn) for turn in turns])
    if (routes := routed_experts(sequences)) is not None:
        columns["routed_experts"] = routes
    if support:
        columns["support_ids"] = np.concatenate([_support_of(turn, support) for turn in turns])
    if turn_rewards:
        is_sampled = np.array([isinstance(turn, Completion) for turn in turns])
        columns["token_rewards"] = _token_rewards(sequences, np.cumsum(lengths)[is_sampled], loss_mask, offsets)
    return columns


def _token_rewards(
    sequences: Sequence[Branch], ends: NDArray[np.int64], loss_mask: NDArray[np.bool_], offsets: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return [N] the reward of each turn of the policy, on one token; `ends` are the offsets behind its turns.

    It is the last token that the policy had sampled by then: for a turn without sampled tokens, that of an earlier
    turn, or else the first sampled token.
    """
    rewards_by_turn: list[float] = []
    for sequence in sequences:
        if sequence.turn_rewards is None:
            raise InvalidRecord("turn_rewards: expected a reward for each turn, for SourceEnv.turn_rewards, got none")
        rewards_by_turn.extend(sequence.turn_rewards)
    sampled = np.flatnonzero(loss_mask)
    turns = [sequence.completions for sequence in sequences]
    first = np.searchsorted(sampled, offsets[:-1]).repeat(turns)
    place = sampled[np.maximum(np.searchsorted(sampled, ends) - 1, first)]
    rewards = np.zeros(len(loss_mask))
    np.add.at(rewards, place, rewards_by_turn)
    return rewards


def _versions(turns: Sequence[Turn], loss_mask: NDArray[np.bool_], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [S] if each sequence has one version; else [N], with the sequence's oldest on tokens not sampled."""
    sampled = np.concatenate([turn.policy_versions for turn in turns if isinstance(turn, Completion)])
    owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    oldest = np.full(len(offsets) - 1, np.iinfo(np.int64).max)
    np.minimum.at(oldest, owner[loss_mask], sampled)
    if (oldest[owner[loss_mask]] == sampled).all():
        return oldest
    versions = oldest[owner]
    versions[loss_mask] = sampled
    return versions


def sampled_anything(rollout: RolloutResult) -> bool:
    """Return whether the policy sampled a token."""
    return any(sequence.sampled_tokens for sequence in rollout.sequences)


def _logprobs_of(turn: Turn) -> NDArray[np.float32]:
    if isinstance(turn, Completion) and turn.logprobs is not None:
        return turn.logprobs
    return np.zeros(len(tokens_of(turn)), np.float32)


def _support_of(turn: Turn, width: int) -> NDArray[np.int32]:
    """Return [T, width] the tokens that each of a turn was drawn from; −1 alone where from all, or not drawn."""
    found = np.full((len(tokens_of(turn)), width), -1, np.int32)
    if isinstance(turn, Completion) and (own := turn.support_ids) is not None:
        if own.shape[1] > width:
            raise InvalidRecord(
                f"support_ids: expected supports of at most {width} tokens, the top_k of SourceEnv.sampling, got "
                f"{own.shape[1]}: give a call no larger top_k"
            )
        found[:, : own.shape[1]] = own
    return found
