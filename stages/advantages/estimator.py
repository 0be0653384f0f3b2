"""From the columns of a handful to its advantages: which rewards count, and which formula makes advantages of them.

The formulas stand in `advantages` and `returns`. Here they are given what they need, and what they are given is held to
being finite: what is masked is left out before that, so that it reaches no statistic whatever it is.

Axes: B sequences, G groups, N tokens, M steps (see `returns`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..._schemas.noise import rounding
from ..group_stack import GroupStack
from .formulas import Groups, Mode, RunningStatistics, dr_grpo, grpo, opo, rloo, whitened
from .presets import Preset
from .returns import Steps, discounted_sums, generalized_advantages, last_places

__all__ = ["BY_TOKEN", "Estimate", "Estimator", "RewardLevel"]

RewardLevel: TypeAlias = Literal["sequence", "token", "both"]
"""Which rewards count: those of sequences, those of tokens, or their sum."""

BY_TOKEN: tuple[Mode, ...] = ("reinforce++", "gae")
"""Modes that give each token an advantage of its own."""

Floats: TypeAlias = NDArray[np.float64]
Flags: TypeAlias = NDArray[np.bool_]


class Estimate(NamedTuple):
    """What was made of a handful."""

    advantages: Floats
    """[B], or [N] in the modes `BY_TOKEN`."""
    trains: Flags
    """[B] or [N], which of them train."""
    deviations: Floats
    """[G] σ of the rewards of each group; 0 where they were taken as equal, or with all others at hand."""
    seen: RunningStatistics
    """What was seen before, and in mode `global` this too."""


class Compared(NamedTuple):
    """Rewards that are compared."""

    values: Floats
    """[B]."""
    noise: Floats
    """[B] how far rounding may have moved each; 0 where a library is followed that does not tell noise from rewards."""
    counted: Flags
    """[B] which enter the statistics."""

    def kept(self) -> tuple[Floats, Floats]:
        """Values and noise of those that are counted."""
        return self.values[self.counted], self.noise[self.counted]

    def beside(self, sizes: NDArray[np.int64]) -> Groups:
        """The same, in groups of `sizes` sequences."""
        return Groups(self.values, self.counted, sizes, self.noise)


@dataclass(frozen=True, slots=True)
class Estimator:
    """How advantages are made."""

    mode: Mode
    level: RewardLevel
    gamma: float
    gae_lambda: float
    whitens: bool
    """Whether advantages of tokens are whitened over the handful."""
    preset: Preset

    def estimate(self, handful: GroupStack, seen: RunningStatistics) -> Estimate:
        """Advantages, neither clipped nor spread; mode `global` compares with everything `seen` before, and this.

        Raises:
            InvalidRecord: something that is needed is missing or not finite; the message names whose.
        """
        live = handful.live()
        rewards = self._compared(handful, live)
        groups = rewards.beside(handful.sizes)
        if self.mode in BY_TOKEN:
            advantages = self._by_token(handful, rewards.noise)
            deviations = _deviations(groups, advantages, groups.owners.repeat(handful.lengths))
            return Estimate(advantages, handful.loss_mask, deviations, seen)
        if self.mode == "global":
            seen = seen.including(*rewards.kept())
        advantages = self._by_sequence(handful, rewards, groups, seen)
        if self.mode == "reinforce++-baseline":
            lengths = handful.completion_lengths()
            compared = lengths if self.preset.masked_count else lengths * (groups.deviations > 0)[groups.owners]
            advantages = self._whitened(advantages, compared, np.zeros(len(advantages)))
        return Estimate(advantages, live, _deviations(groups, advantages, groups.owners), seen)

    # -- one a sequence ----------------------------------------------------------------------------------------------

    def _compared(self, handful: GroupStack, live: Flags) -> Compared:
        counted = np.ones_like(live) if self.preset.masked_count else live
        nothing = np.zeros(len(live))
        noise = nothing if self.level == "token" else handful.noise()
        if self.level == "sequence":
            values = handful.rewards()
        else:
            by_token = self._token_rewards(handful)
            values, noise = handful.sums(by_token), noise + rounding(handful.sums(np.abs(by_token)))
        return Compared(values, noise if self.preset.tells_noise else nothing, counted)

    def _by_sequence(self, handful: GroupStack, rewards: Compared, groups: Groups, seen: RunningStatistics) -> Floats:
        match self.mode:
            case "none":
                return np.where(rewards.counted, rewards.values, 0.0)
            case "global":
                return seen.whitened(rewards.values, rewards.counted)
            case "batch":
                return self._against_batch(rewards, groups)
            case "opo":
                advantages = opo(groups, handful.completion_lengths())
            case "grpo":
                advantages = self._scaled(groups)
            case "rloo":
                advantages = rloo(groups)
            case _:
                advantages = dr_grpo(groups)
        if self.mode not in self.preset.lone_keep:
            return advantages
        deviation = 1 + self.preset.epsilon if self.mode == "grpo" else 1.0
        return np.where((groups.counts == 1)[groups.owners], rewards.values / deviation, advantages)

    def _against_batch(self, rewards: Compared, groups: Groups) -> Floats:
        batch = rewards.beside(np.array([len(rewards.values)]))
        if self.preset.batch_deviation_only:
            return groups.centred / (batch.deviations + self.preset.epsilon)
        return self._scaled(batch)

    def _scaled(self, groups: Groups) -> Floats:
        advantages = grpo(groups, self.preset.epsilon)
        if self.preset.least_deviation:
            advantages[(groups.deviations <= self.preset.least_deviation)[groups.owners]] = 0.0
        return advantages

    # -- one a token -------------------------------------------------------------------------------------------------

    def _by_token(self, handful: GroupStack, noise: Floats) -> Floats:
        """[N] the advantage of each token; `noise` [B] is that of the rewards of its sequence."""
        preset, mask = self.preset, handful.loss_mask
        observations = preset.gae if self.mode == "gae" else preset.returns
        places, remaining = Steps.of(mask, handful.lengths, observations)
        earn = mask | (observations == "counted")
        rewards = np.where(earn, self._token_rewards(handful), 0.0)[places]
        if self.mode == "gae":
            values = handful.column("values", earn | (observations == "valued"))
            if preset.tells_noise:
                noise = noise + rounding(handful.largest(values))
            advantages = generalized_advantages(rewards, values[places], self.gamma, self.gae_lambda, remaining)
        else:
            advantages = discounted_sums(rewards, self.gamma, remaining)
        if self.whitens:
            advantages = self._whitened(advantages, mask[places], noise.repeat(handful.lengths)[places])
        spread = np.zeros(len(mask))
        spread[places] = advantages
        return spread

    def _whitened(self, values: Floats, weights: NDArray[np.int64] | Flags, noise: Floats) -> Floats:
        preset = self.preset
        return whitened(
            values, weights, noise, epsilon=preset.token_epsilon, epsilon_of_variance=preset.token_epsilon_of_variance
        )

    # -- which rewards count -----------------------------------------------------------------------------------------

    def _token_rewards(self, handful: GroupStack) -> Floats:
        """[N] what each token was rewarded with; the reward of a sequence falls on its last token that counts."""
        mask = handful.loss_mask
        count = np.ones_like(mask) if self.preset.masked_count else mask
        earned = np.zeros(len(mask)) if self.level == "sequence" else handful.column("token_rewards", count)
        if self.level != "token":
            last = last_places(count, handful.lengths)
            earned[last[last >= 0]] += handful.rewards()[last >= 0]
        return earned


def _deviations(groups: Groups, advantages: Floats, owners: NDArray[np.int64]) -> Floats:
    """[G] σ of each group, and 0 where it was given nothing but advantages of 0; `owners` are those of `advantages`."""
    moves = np.bincount(owners, advantages != 0, len(groups.deviations)) > 0
    return np.where(moves, groups.deviations, 0.0)
