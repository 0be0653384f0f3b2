"""The token columns of finished rollouts: who said which token, with which weights, and how likely it was.

Knows no environment and no policy, only what they said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._schemas import InvalidRecord
from .engines.policies import Completion
from .environments import RolloutResult

__all__ = ["columns_of", "said_anything", "tokens_of"]


def columns_of(rollouts: Sequence[RolloutResult], *, turn_rewards: bool = False) -> dict[str, Any]:
    """The token columns of `rollouts`, one sequence each: what the policy did not sample has no loss and no logprob.

    Args:
        rollouts: in each of them the policy said something.
        turn_rewards: whether `token_rewards` is one of the columns.

    Raises:
        InvalidRecord: a rollout does not tell its `turn_rewards`.
    """
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    lengths = np.array([len(tokens_of(turn)) for turn in turns])
    turn_ends = np.cumsum([0, *(len(rollout.turns) for rollout in rollouts)])
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
    if turn_rewards:
        spoken = np.array([isinstance(turn, Completion) for turn in turns])
        columns["token_rewards"] = _token_rewards(rollouts, np.cumsum(lengths)[spoken], loss_mask, offsets)
    return columns


def _token_rewards(
    rollouts: Sequence[RolloutResult], ends: NDArray[np.int64], loss_mask: NDArray[np.bool_], offsets: NDArray[np.int64]
) -> NDArray[np.float64]:
    """[N] what each turn of the policy earned, where it ends; `ends` tells behind which token.

    On the last token that the policy had sampled by then: of a turn in which it sampled none, that is an earlier one's,
    and of a first such turn, the first one's that there is.
    """
    earned: list[float] = []
    for rollout in rollouts:
        if rollout.turn_rewards is None:
            raise InvalidRecord("turn_rewards: expected what each turn earned, for SourceEnv.turn_rewards, got none")
        earned.extend(rollout.turn_rewards)
    sampled = np.flatnonzero(loss_mask)
    turns = [sum(isinstance(turn, Completion) for turn in rollout.turns) for rollout in rollouts]
    first = np.searchsorted(sampled, offsets[:-1]).repeat(turns)
    place = sampled[np.maximum(np.searchsorted(sampled, ends) - 1, first)]
    rewards = np.zeros(len(loss_mask))
    np.add.at(rewards, place, earned)
    return rewards


def _versions(
    turns: Sequence[NDArray[np.int32] | Completion], loss_mask: NDArray[np.bool_], offsets: NDArray[np.int64]
) -> NDArray[np.int64]:
    """[S] where every sequence was sampled by one version; else [N], with a sequence's oldest where nobody sampled."""
    sampled = np.concatenate([turn.policy_versions for turn in turns if isinstance(turn, Completion)])
    owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    oldest = np.full(len(offsets) - 1, np.iinfo(np.int64).max)
    np.minimum.at(oldest, owner[loss_mask], sampled)
    if (oldest[owner[loss_mask]] == sampled).all():
        return oldest
    versions = oldest[owner]
    versions[loss_mask] = sampled
    return versions


def said_anything(rollout: RolloutResult) -> bool:
    """Whether the policy sampled a token."""
    return any(isinstance(turn, Completion) and len(turn.tokens) for turn in rollout.turns)


def tokens_of(turn: NDArray[np.int32] | Completion) -> NDArray[np.int32]:
    """What was said in a turn."""
    return turn.tokens if isinstance(turn, Completion) else turn


def _logprobs_of(turn: NDArray[np.int32] | Completion) -> NDArray[np.float32]:
    if isinstance(turn, Completion) and turn.logprobs is not None:
        return turn.logprobs
    return np.zeros(len(tokens_of(turn)), np.float32)
