"""From the columns of a stack of groups to their advantages: select the rewards that count, and apply a formula.

The formulas are in `formulas` and `returns`. This module prepares their arguments and checks that these are finite;
masked values are left out before the check, so that no statistic contains them, even NaN.

Axes: B sequences, G groups, N tokens, M steps (see `returns`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..._schemas.noise import rounding
from ..contracts.group_stack import GroupStack
from .formulas import Groups, Mode, RunningStatistics, dr_grpo, grpo, maxrl, opo, rloo, whitened
from .presets import Preset
from .returns import Steps, discounted_sums, earned_rewards, generalized_advantages
from .units import Baseline, Units

RewardLevel: TypeAlias = Literal["sequence", "token", "both"]
"""The rewards that count: those of sequences, those of tokens, or their sum."""

BY_TOKEN: tuple[Mode, ...] = ("reinforce++", "gae")
"""Modes that give each token an advantage of its own."""

WITHIN_GROUP: tuple[Mode, ...] = ("grpo", "dr_grpo", "rloo", "maxrl", "opo")
"""Modes that compare within a group."""

Floats: TypeAlias = NDArray[np.float64]
Flags: TypeAlias = NDArray[np.bool_]


class Estimate(NamedTuple):
    """The advantages of a stack of groups, and the statistics behind them."""

    advantages: Floats
    """[B], or [N] where tokens have their own: in the modes `BY_TOKEN`, and with another baseline than `rollout`."""
    trains: Flags
    """[B] or [N] true on those that train."""
    deviations: Floats
    """[G] σ of the rewards of each group; 0 where they, or those of the whole stack, count as equal."""
    seen: RunningStatistics
    """The statistics before, and in mode `global` with these rewards."""


class Compared(NamedTuple):
    """Rewards that are compared."""

    values: Floats
    """[B]."""
    noise: Floats
    """[B] how far rounding may have moved each; 0 with a preset that does not distinguish noise from rewards."""
    counted: Flags
    """[B] true on those that enter the statistics."""

    def kept(self) -> tuple[Floats, Floats]:
        """Return values and noise of those that are counted."""
        return self.values[self.counted], self.noise[self.counted]

    def beside(self, sizes: NDArray[np.int64]) -> Groups:
        """Return the rewards in groups of `sizes` sequences."""
        return Groups(self.values, self.counted, sizes, self.noise)


@dataclass(frozen=True, slots=True)
class Estimator:
    """The computation of advantages."""

    mode: Mode
    level: RewardLevel
    gamma: float
    gae_lambda: float
    whitens: bool
    """True if advantages of tokens are whitened over the stack."""
    preset: Preset
    components: Mapping[str, float]
    """The weights of the reward parts that `gdpo` compares, by name."""
    baseline: Baseline = "rollout"

    @property
    def is_by_token(self) -> bool:
        """Return whether tokens of a rollout may have different advantages."""
        return self.mode in BY_TOKEN or self.baseline != "rollout"

    def estimate(self, stack: GroupStack, seen: RunningStatistics) -> Estimate:
        """Return advantages, neither clipped nor spread; mode `global` compares with all rewards in `seen` and these.

        Raises:
            InvalidRecord: a needed value is missing or not finite; the message names the group.
        """
        if self.baseline != "rollout":
            return self._by_unit(stack, self.baseline, seen)
        live = stack.live()
        rewards = self._compared(stack, live)
        groups = rewards.beside(stack.sizes)
        if self.mode in BY_TOKEN:
            advantages = self._by_token(stack, rewards.noise)
            deviations = _deviations(groups, advantages, groups.owners.repeat(stack.lengths))
            return Estimate(advantages, stack.loss_mask, deviations, seen)
        if self.mode == "global":
            seen = seen.including(*rewards.kept())
        advantages = self._by_sequence(stack, rewards, groups, seen)
        if self.mode == "reinforce++-baseline":
            lengths = stack.completion_lengths()
            compared = lengths if self.preset.masked_count else lengths * (groups.deviations > 0)[groups.owners]
            advantages = self._whitened(advantages, compared, np.zeros(len(advantages)))
        return Estimate(advantages, live, _deviations(groups, advantages, groups.owners), seen)

    # -- one for each sequence -----------------------------------------------------------------------------------------

    def _compared(self, stack: GroupStack, live: Flags) -> Compared:
        counted = np.ones_like(live) if self.preset.masked_count else live
        zeros = np.zeros(len(live))
        noise = zeros if self.level == "token" else stack.noise()
        if self.level == "sequence":
            values = stack.rewards()
        else:
            by_token = self._token_rewards(stack)
            values, noise = stack.sums(by_token), noise + rounding(stack.sums(np.abs(by_token)))
        return Compared(values, noise if self.preset.separates_noise else zeros, counted)

    def _by_sequence(self, stack: GroupStack, rewards: Compared, groups: Groups, seen: RunningStatistics) -> Floats:
        match self.mode:
            case "none":
                return np.where(rewards.counted, rewards.values, 0.0)
            case "global":
                return seen.whitened(rewards.values, rewards.counted)
            case "batch":
                return self._against_batch(rewards, groups)
            case "gdpo":
                return self._by_component(stack, rewards)
            case _:
                advantages = self._within_group(groups, stack.completion_lengths())
        return self._with_lone(advantages, rewards.values, groups)

    def _within_group(self, groups: Groups, lengths: NDArray[np.int64]) -> Floats:
        """Return [B] the advantages of rewards that are compared within `groups`; `lengths` [B] are of what trains."""
        match self.mode:
            case "opo":
                return opo(groups, lengths)
            case "grpo":
                return self._scaled(groups)
            case "rloo":
                return rloo(groups)
            case "maxrl":
                return maxrl(groups, self.preset.mean_epsilon)
            case _:
                return dr_grpo(groups)

    def _by_unit(self, stack: GroupStack, baseline: Baseline, seen: RunningStatistics) -> Estimate:
        """Return advantages of tokens, each that of its agent or its turn; see `Units`."""
        mask = stack.loss_mask
        by_token = None if self.level == "sequence" else stack.column("token_rewards", mask)
        by_rollout = None if self.level == "token" else stack.rewards()
        units = Units.of(stack, baseline, by_token, by_rollout, self.gamma)
        advantages = self._within_group(units.groups, units.tokens)
        deviations = units.deviations(len(stack.sizes), advantages)
        spread = np.zeros(len(mask))
        spread[mask] = advantages[units.unit_of_token]
        return Estimate(spread, mask, deviations, seen)

    def _with_lone(self, advantages: Floats, values: Floats, groups: Groups) -> Floats:
        """Return `advantages` [B], in groups of one computed from `values` [B] where the preset keeps these."""
        if self.mode not in self.preset.modes_keeping_lone_rewards:
            return advantages
        deviation = 1 + self.preset.epsilon if self.mode in ("gdpo", "grpo") else 1.0
        return np.where((groups.counts == 1)[groups.owners], values / deviation, advantages)

    def _by_component(self, stack: GroupStack, rewards: Compared) -> Floats:
        """Return [B] the weighted sum of the components, each scaled within its group, whitened over the batch.

        Liu et al., "GDPO" (arXiv:2601.05242). A part contains its weight already: dividing by it gives the values that
        ε was chosen for. As in `reinforce++-baseline`, groups in which nothing differs do not enter the batch.
        """
        total, noise = np.zeros_like(rewards.values), np.zeros_like(rewards.values)
        weights = stack.completion_lengths() if self.preset.gdpo_is_whitened_by_token else rewards.counted
        differ, epsilon = np.full(len(stack.sizes), self.preset.masked_count), self.preset.epsilon
        for name, weight in self.components.items():
            part = self._component(stack, rewards, name, weight)
            groups = part.beside(stack.sizes)
            scaled = self._with_lone(self._scaled(groups), part.values, groups)
            total += weight * scaled
            moved = part.noise + epsilon * self.preset.separates_noise * abs(scaled)  # ε moves σ of small values more
            noise += weight * moved / (groups.deviations + epsilon)[groups.owners]
            differ |= groups.deviations > 0
        return self._whitened(total, weights * differ.repeat(stack.sizes), noise)

    def _component(self, stack: GroupStack, rewards: Compared, name: str, weight: float) -> Compared:
        """Return the values of a component before their weight; `score` is the reward in groups without such a part."""
        score = name == "score"
        values = stack.reward_parts(name, rewards.values if score else None) / weight
        noise = rewards.noise / weight if score else rounding(values) * self.preset.separates_noise
        return Compared(values, noise, rewards.counted)

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

    # -- one for each token --------------------------------------------------------------------------------------------

    def _by_token(self, stack: GroupStack, noise: Floats) -> Floats:
        """Return [N] the advantage of each token; `noise` [B] is that of the rewards of its sequence."""
        preset, mask = self.preset, stack.loss_mask
        observations = preset.gae if self.mode == "gae" else preset.returns
        places, remaining = Steps.of(mask, stack.lengths, observations)
        earn = mask | (observations == "counted")
        rewards = np.where(earn, self._token_rewards(stack), 0.0)[places]
        if self.mode == "gae":
            values = stack.column("values", earn | (observations == "valued"))
            if preset.separates_noise:
                noise = noise + rounding(stack.largest(values))
            advantages = generalized_advantages(rewards, values[places], self.gamma, self.gae_lambda, remaining)
        else:
            advantages = discounted_sums(rewards, self.gamma, remaining)
        if self.whitens:
            advantages = self._whitened(advantages, mask[places], noise.repeat(stack.lengths)[places])
        spread = np.zeros(len(mask))
        spread[places] = advantages
        return spread

    def _whitened(self, values: Floats, weights: NDArray[np.int64] | Flags, noise: Floats) -> Floats:
        preset = self.preset
        return whitened(
            values, weights, noise, epsilon=preset.white_epsilon, epsilon_of_variance=preset.white_epsilon_of_variance
        )

    # -- rewards that count -----------------------------------------------------------------------------------------

    def _token_rewards(self, stack: GroupStack) -> Floats:
        """Return [N] the reward of each token; the reward of a sequence falls on its last token that counts."""
        mask = stack.loss_mask
        count = np.ones_like(mask) if self.preset.masked_count else mask
        by_token = None if self.level == "sequence" else stack.column("token_rewards", count)
        return earned_rewards(count, stack.lengths, by_token, None if self.level == "token" else stack.rewards())


def _deviations(groups: Groups, advantages: Floats, owners: NDArray[np.int64]) -> Floats:
    """Return [G] σ of each group, 0 where all its advantages are 0; `owners` gives the group of each advantage."""
    moves = np.bincount(owners, advantages != 0, len(groups.deviations)) > 0
    return np.where(moves, groups.deviations, 0.0)
