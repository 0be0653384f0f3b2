"""Several groups side by side, so that one pass serves them all: a numpy call costs about 1 µs whatever it is given.

Axes: G groups, B sequences and N tokens in all, one group behind the other. What is computed is held to the rules of
its column and cut back into the groups, which therefore need not be checked once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..schemas import TrajectoryGroup
from ..schemas.columns import as_column, check_axes, count_between, freeze
from ..schemas.group import GROUP_RULES, PART_PREFIX

__all__ = ["Handful"]

Floats: TypeAlias = NDArray[np.float64]

FIRST = np.zeros(1, np.int64)
"""Where the first sequence begins."""


class Handful:
    """One group or more."""

    __slots__ = ("_groups", "_lengths", "_loss_mask", "_spans", "sizes")

    def __init__(self, groups: Sequence[TrajectoryGroup]) -> None:
        self._groups = groups
        self._lengths = np.concatenate([group.lengths() for group in groups])
        """[B] tokens of each sequence."""
        self._loss_mask = np.concatenate([group.loss_mask for group in groups])
        """[N]."""
        sizes = [len(group) for group in groups]
        self.sizes = np.array(sizes, np.int64)
        """[G] sequences of each group."""
        self._spans = _spans(sizes)
        """Where the sequences of each group lie among all."""

    def rewards(self) -> Floats:
        """[B]."""
        return np.concatenate([group.rewards for group in self._groups], dtype=np.float64)

    def reward_parts(self, name: str, otherwise: Floats) -> Floats:
        """[B] the part of that name; where a group has none, `otherwise` [B]."""
        parts = [group.reward_parts.get(name, otherwise[span]) for group, span in self._each(self._spans)]
        return np.concatenate(parts, dtype=np.float64)

    def completion_lengths(self) -> NDArray[np.int64]:
        """[B] tokens that train."""
        return count_between(self._loss_mask, np.concatenate([FIRST, self._lengths.cumsum()]))

    def live(self) -> NDArray[np.bool_]:
        """[B] which sequences have a token that trains."""
        filled = self._lengths > 0
        live = np.zeros(len(filled), np.bool_)
        starts = self._lengths.cumsum() - self._lengths
        live[filled] = np.logical_or.reduceat(self._loss_mask, starts[filled])
        return live

    def with_rewards(self, rewards: Floats, parts: Mapping[str, Floats]) -> list[TrajectoryGroup]:
        """The same groups with other `rewards` [B], and `parts` ([B] each) added to their `reward_parts`.

        Raises:
            InvalidRecord: a column is not finite.
        """
        names = ["rewards", *(PART_PREFIX + name for name in parts)]
        columns = as_column("rewards", np.stack([rewards, *parts.values()]), np.float32)
        _check_finite(dict(zip(names, columns, strict=True)), columns)
        freeze([columns])
        checked, *added = columns
        return [
            msgspec.structs.replace(
                group,
                rewards=checked[span],
                reward_parts=group.reward_parts | {n: part[span] for n, part in zip(parts, added, strict=True)},
            )
            for group, span in self._each(self._spans)
        ]

    def with_advantages(self, advantages: Floats) -> list[TrajectoryGroup]:
        """The same groups with `advantages` [B]: the value of each sequence on its tokens that train, 0 elsewhere.

        Their columns share one piece of memory, which is free when the last of the groups is; `owned` parts from it.

        Raises:
            InvalidRecord: one is not finite.
        """
        checked = as_column("advantages", advantages, np.float32)
        _check_finite({"advantages": checked}, checked)
        column = checked.repeat(self._lengths)
        column[~self._loss_mask] = 0
        freeze([column])
        spans = _spans(len(group.tokens) for group in self._groups)
        return [msgspec.structs.replace(group, advantages=column[span]) for group, span in self._each(spans)]

    def _each(self, spans: Sequence[slice]) -> Iterable[tuple[TrajectoryGroup, slice]]:
        return zip(self._groups, spans, strict=True)


def _check_finite(columns: Mapping[str, NDArray[np.float32]], values: NDArray[np.float32]) -> None:
    """Hold columns, whose values are `values`, to the one rule that arithmetic can break."""
    if not np.isfinite(values).all():
        check_axes(columns, dict.fromkeys(columns, GROUP_RULES["rewards"]), {})


def _spans(sizes: Iterable[int]) -> list[slice]:
    """Where things of those sizes lie, one behind the other."""
    return [slice(*span) for span in pairwise(accumulate(sizes, initial=0))]
