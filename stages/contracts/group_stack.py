"""Several groups side by side, processed in one pass: a numpy call costs about 1 µs however small its arrays.

Axes: G groups, R rollouts, B sequences and N tokens in all, one group behind the other. The branches of a rollout lie
one after another, and are taken as one sequence here. Results are checked against the rules of
their column and cut back into the groups, without a further check.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..._schemas import InvalidRecord, TrajectoryGroup
from ..._schemas.columns import as_column, count_between, freeze
from ..._schemas.conversion import convert
from ..._schemas.group import PART_PREFIX, check_branches
from ..._schemas.noise import LARGE, check_distinct, rounding

Floats: TypeAlias = NDArray[np.float64]

AGENTS = "agents"
"""Key of a group's `meta` with the agent of each sequence, by repetition, where a rollout has several agents."""

Agent: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]

FIRST = np.zeros(1, np.int64)
"""Offset of the first sequence."""


class GroupStack:
    """One group or more."""

    __slots__ = (
        "_branches",
        "_firsts",
        "_groups",
        "_part_names",
        "_rewards",
        "_spans",
        "lengths",
        "loss_mask",
        "sizes",
    )

    def __init__(self, groups: Sequence[TrajectoryGroup]) -> None:
        self._groups = groups
        counts = [len(group.rewards) for group in groups]
        sizes = [group.rollouts for group in groups]
        self.sizes = np.array(sizes, np.int64)
        """[G] number of rollouts of each group."""
        self._firsts: list[NDArray[np.int64]] | None = None
        """The first sequence of each rollout, by group; None if each rollout has one sequence."""
        self._branches: NDArray[np.int64] | None = None
        """[R] number of sequences of each rollout; None if each has one."""
        lengths = _lengths(np.concatenate([group.offsets for group in groups]), np.array(counts, np.int64))
        if sizes != counts:
            for group in groups:
                check_branches(group)
            self._firsts = [group.rollout_starts() for group in groups]
            pairs = zip(self._firsts, counts, strict=True)
            self._branches = np.concatenate([np.diff(firsts, append=count) for firsts, count in pairs])
            lengths = np.add.reduceat(lengths, self._branches.cumsum() - self._branches)
        self.lengths = lengths
        """[R] number of tokens of each rollout."""
        self.loss_mask = np.concatenate([group.loss_mask for group in groups])
        """[N]."""
        self._rewards = self._of_rollouts([group.rewards for group in groups])
        self._spans = _spans(sizes)
        """The span of each group among the rollouts."""
        self._part_names = set[str]().union(*(group.reward_parts for group in groups))
        """Names of the `reward_parts` that any of the groups has."""

    def _of_rollouts(self, columns: Sequence[NDArray[np.float32]]) -> Floats:
        """Return [R] the values of rollouts, from a column over sequences of each group."""
        if self._firsts is not None:
            columns = [column[firsts] for column, firsts in zip(columns, self._firsts, strict=True)]
        return np.concatenate(columns, dtype=np.float64)

    def rewards(self) -> Floats:
        """Return [R] the rewards.

        Raises:
            InvalidRecord: one is not finite; the message names the trajectory.
        """
        self._check_finite("rewards", self._rewards, by_token=False)
        return self._rewards

    def noise(self) -> Floats:
        """Return [R] how far rounding may have moved each reward."""
        own = rounding(self._rewards)
        noises = [group.reward_noise for group in self._groups]
        if all(noise is None for noise in noises):
            return own
        parts = [
            np.zeros(len(group), np.float32) if noise is None else noise
            for group, noise in zip(self._groups, noises, strict=True)
        ]
        return np.maximum(own, self._of_rollouts(parts))

    def reward_parts(self, name: str, otherwise: Floats | None = None) -> Floats:
        """Return [R] the reward part `name`; where a group has none, `otherwise` [R].

        Raises:
            InvalidRecord: without `otherwise`, a group has no such part; the message names the group.
        """
        if otherwise is None:
            self._check_part(name)
            otherwise = self._rewards
        if name not in self._part_names:
            return otherwise
        firsts: Sequence[Any] = [slice(None)] * len(self._groups) if self._firsts is None else self._firsts
        parts = [
            otherwise[span] if (part := group.reward_parts.get(name)) is None else part[places]
            for group, span, places in zip(self._groups, self._spans, firsts, strict=True)
        ]
        return np.concatenate(parts, dtype=np.float64)

    def _check_part(self, name: str) -> None:
        for group in self._groups:
            if name not in group.reward_parts:
                parts = ", ".join(sorted(group.reward_parts)) or "none"
                raise InvalidRecord(f"{group.env}/{group.instance_id}: reward_parts: expected {name}, got {parts}")

    def sequences(self) -> NDArray[np.int64]:
        """Return [N] the sequence of each token, counted over all groups."""
        lengths = np.concatenate([group.lengths() for group in self._groups])
        return np.arange(len(lengths)).repeat(lengths)

    def agents(self) -> NDArray[np.int64]:
        """Return [N] the agent that each token is of, by `meta["agents"]` of its group; 0 without.

        Raises:
            InvalidRecord: a group has no number for each sequence of each rollout.
        """
        return np.concatenate([agents_of(group).repeat(group.lengths()) for group in self._groups])

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
        """Return [R] the sum of `values` [N] over each rollout."""
        count = len(self.lengths)
        return np.asarray(np.bincount(np.arange(count).repeat(self.lengths), values, count), np.float64)

    def completion_lengths(self) -> NDArray[np.int64]:
        """Return [R] the number of tokens that train."""
        return count_between(self.loss_mask, np.concatenate([FIRST, self.lengths.cumsum()]))

    def live(self) -> NDArray[np.bool_]:
        """Return [R] true on rollouts with a token that trains."""
        live = np.zeros(len(self.lengths), np.bool_)
        live[self.lengths > 0] = np.logical_or.reduceat(self.loss_mask, self._starts())
        return live

    def largest(self, values: Floats) -> Floats:
        """Return [R] the largest magnitude among `values` [N] of each rollout; 0 where it has no tokens."""
        largest = np.zeros(len(self.lengths))
        largest[self.lengths > 0] = np.maximum.reduceat(np.abs(values), self._starts())
        return largest

    def _starts(self) -> NDArray[np.int64]:
        """Return the start of each rollout that has tokens."""
        return (self.lengths.cumsum() - self.lengths)[self.lengths > 0]

    def with_rewards(self, rewards: Floats, noise: Floats, parts: Mapping[str, Floats]) -> list[TrajectoryGroup]:
        """Return the groups with other `rewards` [R], their `noise` [R], and `parts` ([R] each) among `reward_parts`.

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
        spans = self._spans
        if self._branches is not None:
            columns, spans = columns.repeat(self._branches, axis=1), _spans(len(group) for group in self._groups)
        freeze([columns])
        cut = [[column[span] for span in spans] for column in columns]
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
        """Return the groups with `advantages` [R]: the value of each rollout on its tokens that train, 0 elsewhere.

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
        """Check that `values`, [N] if `by_token` else [R], are finite: arithmetic may overflow."""
        finite = np.isfinite(values)
        if not finite.all():
            first = finite.argmin()
            starts = [(group.ids, group.rollout_starts().tolist()) for group in self._groups]
            ids = [of_rows[place] for of_rows, places in starts for place in places]
            owners = np.arange(len(ids)).repeat(self.lengths if by_token else 1)
            env, instance_id, repetition_id = ids[owners[first]]
            raise InvalidRecord(
                f"{env}/{instance_id}, repetition {repetition_id}: {name}: expected finite values, got {values[first]}"
            )


def agents_of(group: TrajectoryGroup) -> NDArray[np.int64]:
    """Return [B] the agent of each sequence; see `GroupStack.agents`."""
    given = group.meta.get(AGENTS)
    if given is None:
        return np.zeros(len(group), np.int64)
    starts = group.rollout_starts()
    counts = np.diff(starts, append=len(group)).tolist()
    try:
        known = convert(given, list[list[Agent] | None])
        found = [known[repetition] or [] for repetition in group.rollout_ids[starts].tolist()]
    except (msgspec.ValidationError, IndexError):
        found = []
    if [len(agents) for agents in found] != counts:
        raise InvalidRecord(
            f"{group.env}/{group.instance_id}: meta {AGENTS!r}: expected by repetition a list of the agent of each "
            f"of its {counts} sequences, got {given!r:.100}"
        )
    return np.array([agent for agents in found for agent in agents], np.int64)


def _lengths(offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [R] the lengths of sequences at `offsets` [B + G], group after group of `sizes` [G]."""
    steps = offsets[1:] - offsets[:-1]
    within = np.ones(len(steps), np.bool_)
    within[(sizes + 1).cumsum()[:-1] - 1] = False  # from the end of a group to the start of the next, which is 0
    return steps[within]


def _spans(sizes: Iterable[int]) -> list[slice]:
    """Return the spans of items of these sizes that lie one behind the other."""
    return [slice(*span) for span in pairwise(accumulate(sizes, initial=0))]
