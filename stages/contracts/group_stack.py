"""Several groups side by side, processed in one pass: a numpy call costs about 1 µs however small its arrays.

Axes: G groups, B sequences and N tokens in all, one group behind the other. Results are checked against the rules of
their column and cut back into the groups, without a further check.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..._schemas import InvalidRecord, TrajectoryGroup
from ..._schemas.columns import as_column, count_between, freeze
from ..._schemas.group import PART_PREFIX
from ..._schemas.noise import LARGE, check_distinct, rounding

Floats: TypeAlias = NDArray[np.float64]

FIRST = np.zeros(1, np.int64)
"""Offset of the first sequence."""


class GroupStack:
    """One group or more."""

    __slots__ = ("_groups", "_part_names", "_rewards", "_spans", "lengths", "loss_mask", "sizes")

    def __init__(self, groups: Sequence[TrajectoryGroup]) -> None:
        self._groups = groups
        sizes = [len(group.rewards) for group in groups]
        self.sizes = np.array(sizes, np.int64)
        """[G] number of sequences of each group."""
        self.lengths = _lengths(np.concatenate([group.offsets for group in groups]), self.sizes)
        """[B] number of tokens of each sequence."""
        self.loss_mask = np.concatenate([group.loss_mask for group in groups])
        """[N]."""
        self._rewards: Floats = np.concatenate([group.rewards for group in groups], dtype=np.float64)
        self._spans = _spans(sizes)
        """The span of each group among the sequences."""
        self._part_names = set[str]().union(*(group.reward_parts for group in groups))
        """Names of the `reward_parts` that any of the groups has."""

    def rewards(self) -> Floats:
        """Return [B] the rewards.

        Raises:
            InvalidRecord: one is not finite; the message names the trajectory.
        """
        self._check_finite("rewards", self._rewards, by_token=False)
        return self._rewards

    def noise(self) -> Floats:
        """Return [B] how far rounding may have moved each reward."""
        own = rounding(self._rewards)
        noises = [group.reward_noise for group in self._groups]
        if all(noise is None for noise in noises):
            return own
        parts = [own[span] if noise is None else noise for noise, span in zip(noises, self._spans, strict=True)]
        return np.maximum(own, np.concatenate(parts, dtype=np.float64))

    def reward_parts(self, name: str, otherwise: Floats) -> Floats:
        """Return [B] the reward part `name`; where a group has none, `otherwise` [B]."""
        if name not in self._part_names:
            return otherwise
        parts = [
            group.reward_parts.get(name, otherwise[span]) for group, span in zip(self._groups, self._spans, strict=True)
        ]
        return np.concatenate(parts, dtype=np.float64)

    def column(self, name: str, used: NDArray[np.bool_]) -> Floats:
        """Return [N] the column `name` over tokens; 0 where `used` [N] is false, also in place of NaN.

        Raises:
            InvalidRecord: a group lacks it, or a used value is not finite; the message names the group.
        """
        columns = []
        for group in self._groups:
            column = getattr(group, name)
            if column is None:
                raise InvalidRecord(f"{group.env}/{group.instance_id}: {name}: expected a column, got none")
            columns.append(column)
        values = np.where(used, np.concatenate(columns, dtype=np.float64), 0.0)
        self._check_finite(name, values, by_token=True)
        return values

    def sums(self, values: Floats) -> Floats:
        """Return [B] the sum of `values` [N] over each sequence."""
        count = len(self.lengths)
        return np.asarray(np.bincount(np.arange(count).repeat(self.lengths), values, count), np.float64)

    def completion_lengths(self) -> NDArray[np.int64]:
        """Return [B] the number of tokens that train."""
        return count_between(self.loss_mask, np.concatenate([FIRST, self.lengths.cumsum()]))

    def live(self) -> NDArray[np.bool_]:
        """Return [B] true on sequences with a token that trains."""
        live = np.zeros(len(self.lengths), np.bool_)
        live[self.lengths > 0] = np.logical_or.reduceat(self.loss_mask, self._starts())
        return live

    def largest(self, values: Floats) -> Floats:
        """Return [B] the largest magnitude among `values` [N] of each sequence; 0 where it has no tokens."""
        largest = np.zeros(len(self.lengths))
        largest[self.lengths > 0] = np.maximum.reduceat(np.abs(values), self._starts())
        return largest

    def _starts(self) -> NDArray[np.int64]:
        """Return the start of each sequence that has tokens."""
        return (self.lengths.cumsum() - self.lengths)[self.lengths > 0]

    def with_rewards(self, rewards: Floats, noise: Floats, parts: Mapping[str, Floats]) -> list[TrajectoryGroup]:
        """Return the groups with other `rewards` [B], their `noise` [B], and `parts` ([B] each) among `reward_parts`.

        Raises:
            InvalidRecord: one is not finite, possibly only in float32, or those of a group differ by less than float32
                can hold; the message names the trajectory or the group.
        """
        columns = as_column("rewards", np.array([rewards, noise, *parts.values()]), np.float32)
        if not np.isfinite(columns).all():
            names = ["rewards", "reward_noise", *(PART_PREFIX + name for name in parts)]
            for name, column in zip(names, columns, strict=True):
                self._check_finite(name, column, by_token=False)
        self._check_distinct(rewards)
        freeze([columns])
        cut = [[column[span] for span in self._spans] for column in columns]
        return [
            msgspec.structs.replace(
                group,
                rewards=own,
                reward_noise=rounded,
                reward_parts={**group.reward_parts, **dict(zip(parts, added, strict=True))},
            )
            for group, own, rounded, *added in zip(self._groups, *cut, strict=True)
        ]

    def with_advantages(self, advantages: Floats) -> list[TrajectoryGroup]:
        """Return the groups with `advantages` [B]: the value of each sequence on its tokens that train, 0 elsewhere.

        Their columns share one buffer, free when the last of the groups is; `owned` copies a column out of it.

        Raises:
            InvalidRecord: see `with_rewards`.
        """
        checked = as_column("advantages", advantages, np.float32)
        self._check_finite("advantages", checked, by_token=False)
        return self._with_advantages(checked.repeat(self.lengths))

    def with_token_advantages(self, advantages: Floats) -> list[TrajectoryGroup]:
        """Return the groups with `advantages` [N] on the tokens that train, 0 elsewhere; see `with_advantages`.

        Raises:
            InvalidRecord: see `with_rewards`.
        """
        checked = as_column("advantages", advantages, np.float32)
        self._check_finite("advantages", checked, by_token=True)
        return self._with_advantages(checked)

    def _with_advantages(self, column: NDArray[np.float32]) -> list[TrajectoryGroup]:
        np.copyto(column, 0, where=~self.loss_mask)
        freeze([column])
        spans = _spans(len(group.tokens) for group in self._groups)
        return [
            msgspec.structs.replace(group, advantages=column[span])
            for group, span in zip(self._groups, spans, strict=True)
        ]

    def _check_distinct(self, rewards: Floats) -> None:
        if np.abs(rewards).max(initial=0) < LARGE:
            return
        for group, span in zip(self._groups, self._spans, strict=True):
            try:
                check_distinct(rewards[span])
            except InvalidRecord as error:
                raise InvalidRecord(f"{group.env}/{group.instance_id}: {error}") from None

    def _check_finite(self, name: str, values: Floats | NDArray[np.float32], *, by_token: bool) -> None:
        """Check that `values`, [N] if `by_token` else [B], are finite: arithmetic may overflow."""
        finite = np.isfinite(values)
        if not finite.all():
            first = finite.argmin()
            ids = [trajectory_id for group in self._groups for trajectory_id in group.ids]
            owners = np.arange(len(ids)).repeat(self.lengths if by_token else 1)
            env, instance_id, repetition_id = ids[owners[first]]
            raise InvalidRecord(
                f"{env}/{instance_id}, repetition {repetition_id}: {name}: expected finite values, got {values[first]}"
            )


def _lengths(offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [B] the lengths of sequences at `offsets` [B + G], group after group of `sizes` [G]."""
    steps = offsets[1:] - offsets[:-1]
    within = np.ones(len(steps), np.bool_)
    within[(sizes + 1).cumsum()[:-1] - 1] = False  # from the end of a group to the start of the next, which is 0
    return steps[within]


def _spans(sizes: Iterable[int]) -> list[slice]:
    """Return the spans of items of these sizes that lie one behind the other."""
    return [slice(*span) for span in pairwise(accumulate(sizes, initial=0))]
