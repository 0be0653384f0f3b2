"""The targets of a critic: advantages and returns of the tokens of a batch, from the values that it predicted.

GAE of `returns`, over the tokens that train; tokens between them, of a tool or a prompt, are skipped. The branches of a
rollout follow each other, as in `AdvantageNormalizer`: behind the last token of one comes the first of the next. No
value is assumed behind the last token of a rollout, whether it ended by itself or was cut, as in verl, SkyRL and TRL.

Axes: N tokens of a batch, or of a rank's share of it.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..._schemas import InvalidRecord, TrainBatch
from ..._schemas.noise import rounding
from .estimator import RewardLevel
from .formulas import RunningStatistics
from .returns import Steps, earned_rewards, generalized_advantages

Floats: TypeAlias = NDArray[np.float64]

EPSILON_OF_VARIANCE = 1e-8
"""Added to σ² where advantages are whitened, as verl does."""

EPSILON_OF_EXPLAINED = 1e-5
"""Added to the variance of the returns where another is divided by it, as verl does."""


class Targets(NamedTuple):
    """The targets of this rank's share of a batch."""

    advantages: Floats
    """[N] not whitened; 0 on tokens that do not train."""
    returns: Floats
    """[N] advantage plus value; 0 on tokens that do not train."""
    noise: Floats
    """[N] how far rounding may have moved each advantage."""


class Spread(NamedTuple):
    """Statistics over the tokens that train, of a rank's share or of a whole batch."""

    advantages: RunningStatistics = RunningStatistics()
    returns: RunningStatistics = RunningStatistics()
    errors: RunningStatistics = RunningStatistics()
    """Of returns less values."""

    @classmethod
    def of(cls, targets: Targets, loss_mask: NDArray[np.bool_]) -> Spread:
        """Return the statistics of the tokens [N] where `loss_mask` [N] is true."""
        advantages, returns, noise = (column[loss_mask] for column in targets)
        errors = RunningStatistics.of(advantages, noise)  # advantage = return − value
        return cls(errors, RunningStatistics.of(returns, noise), errors)

    def merged(self, other: Spread) -> Spread:
        """Return the statistics of both."""
        return Spread(*(mine.merged(its) for mine, its in zip(self, other, strict=True)))

    def whitened(self, advantages: Floats) -> Floats:
        """Return [N] (A − mean) / √(σ² + 1e-8); 0 everywhere if no two differ by more than their noise."""
        if not self.advantages.deviation:
            return np.zeros(len(advantages))
        whitened: Floats = (advantages - self.advantages.mean) / np.sqrt(self.advantages.variance + EPSILON_OF_VARIANCE)
        return whitened

    @property
    def explained_variance(self) -> float:
        """Return the share of the variance of the returns that the values explain, at most 1; that of verl."""
        return 1 - self.errors.variance / (self.returns.variance + EPSILON_OF_EXPLAINED)

    @property
    def mean_value(self) -> float:
        """Return the mean of the values."""
        return self.returns.mean - self.errors.mean


def targets_of(batch: TrainBatch, values: Floats, *, gamma: float, gae_lambda: float, rewards: RewardLevel) -> Targets:
    """Return the targets of `batch`.

    Args:
        batch: whole rollouts.
        values: [N] the return that a critic expected before each token.
        gamma: discount from one token that trains to the next.
        gae_lambda: λ.
        rewards: those of rollouts, on the last token that trains of each; those of tokens; or both.

    Raises:
        InvalidRecord: the batch lacks the rewards of tokens, or a reward or a value is not finite.
    """
    mask, starts = batch.loss_mask, batch.rollout_starts()
    if not len(starts):
        return Targets(*(np.zeros(len(mask)) for _ in Targets._fields))
    lengths = np.add.reduceat(batch.lengths(), starts)
    by_token = None if rewards == "sequence" else _token_rewards(batch)
    by_rollout = None if rewards == "token" else batch.rewards[starts].astype(np.float64)
    earned = earned_rewards(mask, lengths, by_token, by_rollout)
    places, remaining = Steps.of(mask, lengths, "skipped")
    _check_finite(batch, "rewards", earned)
    _check_finite(batch, "values", np.where(mask, values, 0.0))
    found = generalized_advantages(earned[places], values[places], gamma, gae_lambda, remaining)
    advantages, returns = np.zeros(len(mask)), np.zeros(len(mask))
    advantages[places], returns[places] = found, found + values[places]
    return Targets(advantages, returns, _noise(batch, lengths, earned, values))


def _token_rewards(batch: TrainBatch) -> Floats:
    if batch.token_rewards is None:
        raise InvalidRecord("token_rewards: expected a column, got none: have the environment, or KLReward, fill it")
    return batch.token_rewards.astype(np.float64)


def _noise(batch: TrainBatch, lengths: NDArray[np.int64], earned: Floats, values: Floats) -> Floats:
    """Return [N] the noise of the rewards of each token's rollout, and of its largest value."""
    owners = np.arange(len(lengths)).repeat(lengths)
    of_rewards = rounding(np.bincount(owners, np.abs(earned), len(lengths)))
    if batch.reward_noise is not None:
        of_rewards = np.maximum(of_rewards, batch.reward_noise[batch.rollout_starts()])
    largest = np.zeros(len(lengths))
    np.maximum.at(largest, owners, np.where(batch.loss_mask, np.abs(values), 0.0))
    return np.asarray((of_rewards + rounding(largest))[owners])


def _check_finite(batch: TrainBatch, name: str, values: Floats) -> None:
    finite = np.isfinite(values)
    if not finite.all():
        first = int(finite.argmin())
        env, instance_id, repetition = batch.ids[int(batch.sequence_of_token()[first])]
        raise InvalidRecord(
            f"{env}/{instance_id}, repetition {repetition}: {name}: expected finite values, got {values[first]}"
        )
