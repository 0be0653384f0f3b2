"""Units: the parts of rollouts that are compared with each other, in place of whole rollouts.

A rollout of several agents, or of several turns, has parts of different tasks: a planner beside those that it calls, a
first turn beside a last one. A *unit* is what one agent of a rollout sampled, or one turn of it; it is compared with
the units of the same agent, or of the same turn of the same agent, in the other rollouts of the group. The k-th turn of
an agent is the k-th of its runs of tokens that train, in the order in which its sequences lie.

The value of an agent's unit is the sum of its rewards. That of a turn is the discounted sum of its reward and those of
the later turns of its agent; a step of the discount is a turn. The reward of a rollout, where it counts, is added to
the value of each agent, and to the reward of each agent's last turn.

Axes: G groups, R rollouts, N tokens, T of which train, U units, M turns.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..._schemas.noise import rounding
from ..contracts.group_stack import GroupStack
from .formulas import Groups
from .returns import discounted_sums

Baseline: TypeAlias = Literal["rollout", "agent", "turn"]
"""What is compared with its like in the other rollouts of a group."""

Floats: TypeAlias = NDArray[np.float64]
Places: TypeAlias = NDArray[np.int64]


class Units(NamedTuple):
    """The units of a stack, sorted so that those that are compared lie side by side."""

    groups: Groups
    """Their values; each set of units that are compared is one of its groups."""
    tokens: Places
    """[U] tokens of each that train."""
    unit_of_token: Places
    """[T] the unit of each token that trains."""
    group_of_set: Places
    """The group of each set of units that are compared."""

    @classmethod
    def of(
        cls, stack: GroupStack, baseline: Baseline, by_token: Floats | None, by_rollout: Floats | None, gamma: float
    ) -> Units:
        """Return the units of a stack.

        Args:
            stack: the groups.
            baseline: `agent` or `turn`.
            by_token: [N] rewards of tokens; None for none.
            by_rollout: [R] rewards of rollouts; None for none.
            gamma: discount of later turns.
        """
        turns = _Turns.of(stack)
        earned = np.array([turns.sums(values) for values in (by_token, None if by_token is None else abs(by_token))])
        noise = np.zeros(len(turns.rollout))
        if by_rollout is not None:
            last = turns.remaining == 0
            earned[:, last] += np.array([by_rollout, abs(by_rollout)])[:, turns.rollout[last]]
            noise = stack.noise()[turns.rollout]
        group = np.arange(len(stack.sizes)).repeat(stack.sizes)[turns.rollout]
        if baseline == "turn":
            values, sizes = (discounted_sums(each, gamma, turns.remaining) for each in earned)
            return _beside(values, rounding(sizes) + noise, (group, turns.agent, turns.number), turns.of_token)
        first = turns.number == 0
        values, sizes = (np.add.reduceat(each, np.flatnonzero(first)) for each in earned)
        return _beside(
            values, rounding(sizes) + noise[first], (group[first], turns.agent[first]), turns.part[turns.of_token]
        )

    def deviations(self, groups: int, advantages: Floats) -> Floats:
        """Return [G] the largest σ of each group; 0 where all its `advantages` [U] are 0."""
        found = np.zeros(groups)
        moves = np.bincount(self.groups.owners, advantages != 0, len(self.group_of_set)) > 0
        np.maximum.at(found, self.group_of_set, np.where(moves, self.groups.deviations, 0.0))
        return found


class _Turns(NamedTuple):
    """The turns of a stack, those of an agent of a rollout one behind the other."""

    rollout: Places
    """[M]."""
    agent: Places
    """[M]."""
    part: Places
    """[M] the part of a rollout that one agent sampled, counted over all."""
    number: Places
    """[M] among those of its part."""
    remaining: Places
    """[M] turns of its part behind it."""
    trained: Places
    """[T] the tokens that train."""
    of_token: Places
    """[T] the turn of each."""

    @classmethod
    def of(cls, stack: GroupStack) -> _Turns:
        """Return the turns: runs of tokens that train in one sequence."""
        trained = np.flatnonzero(stack.loss_mask)
        rollouts = np.arange(len(stack.lengths)).repeat(stack.lengths)[trained]
        agents, sequences = stack.agents()[trained], stack.sequences()[trained]
        begins = np.append(True, (np.diff(trained) > 1) | (np.diff(sequences) > 0))[: len(trained)]
        rollout, agent = rollouts[begins], agents[begins]
        order = np.lexsort((np.arange(len(rollout)), agent, rollout))
        rollout, agent = rollout[order], agent[order]
        first = np.append(True, (np.diff(rollout) > 0) | (np.diff(agent) != 0))[: len(order)]
        part = first.cumsum() - 1
        number = np.arange(len(order)) - np.flatnonzero(first)[part]
        remaining = np.bincount(part)[part] - number - 1
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        return cls(rollout, agent, part, number, remaining, trained, rank[begins.cumsum() - 1])

    def sums(self, by_token: Floats | None) -> Floats:
        """Return [M] the sum of `by_token` [N] over each turn; 0 for None."""
        if by_token is None:
            return np.zeros(len(self.rollout))
        return np.asarray(np.bincount(self.of_token, by_token[self.trained], len(self.rollout)), np.float64)


def _beside(values: Floats, noise: Floats, keys: tuple[Places, ...], unit_of_token: Places) -> Units:
    """Return units [U] sorted by `keys`, the first of which is the group; units of equal keys are compared."""
    order = np.lexsort((np.arange(len(values)), *keys[::-1]))
    compared = np.array([key[order] for key in keys])
    first = np.append(True, (np.diff(compared, axis=1) != 0).any(0))[: len(order)]
    sizes = np.diff(np.append(np.flatnonzero(first), len(order)))
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    groups = Groups(values[order], np.ones(len(order), np.bool_), sizes, noise[order])
    owners = rank[unit_of_token]
    return Units(groups, np.bincount(owners, minlength=len(order)), owners, compared[0][first])
