"""Several groups side by side, so that one pass over their sequences serves them all.

Axes: G groups, S sequences of one of them, B of all. What is computed is cut back into the groups' own columns; values
are held to the rules of the columns before they are cut, so the groups that come out are not checked once more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..schemas import TrajectoryGroup
from ..schemas.columns import as_column, check_axes, freeze
from ..schemas.group import GROUP_RULES, PART_PREFIX

__all__ = ["Handful", "live_sequences"]

Floats: TypeAlias = NDArray[np.float64]


class Handful:
    """One group or more, whose sequences lie one behind the other."""

    __slots__ = ("_spans", "groups", "sizes")

    def __init__(self, groups: Sequence[TrajectoryGroup]) -> None:
        self.groups = groups
        self.sizes = np.array([len(group) for group in groups], np.int64)
        """[G] sequences of each."""
        self._spans = [slice(*span) for span in pairwise(accumulate(self.sizes.tolist(), initial=0))]

    def rewards(self) -> Floats:
        """[B]."""
        return np.concatenate([group.rewards for group in self.groups], dtype=np.float64)

    def reward_parts(self, name: str, otherwise: Floats) -> Floats:
        """[B] the part of that name; where a group has none, `otherwise` [B]."""
        parts = [group.reward_parts.get(name, otherwise[span]) for group, span in self._each()]
        return np.concatenate(parts, dtype=np.float64)

    def completion_lengths(self) -> NDArray[np.int64]:
        """[B] tokens that train."""
        return np.concatenate([group.completion_lengths() for group in self.groups])

    def live(self) -> NDArray[np.bool_]:
        """[B] which sequences have a token that trains."""
        return np.concatenate([live_sequences(group) for group in self.groups])

    def with_rewards(self, rewards: Floats, parts: Mapping[str, Floats]) -> list[TrajectoryGroup]:
        """The same groups with other `rewards` [B], and `parts` ([B] each) added to their `reward_parts`.

        Raises:
            InvalidRecord: a column is not finite.
        """
        columns = {"rewards": as_column("rewards", rewards, np.float32)}
        columns |= {PART_PREFIX + name: as_column(PART_PREFIX + name, part, np.float32) for name, part in parts.items()}
        check_axes(columns, dict.fromkeys(columns, GROUP_RULES["rewards"]), {})
        freeze(columns.values())
        checked, *added = columns.values()
        return [
            msgspec.structs.replace(
                group,
                rewards=checked[span],
                reward_parts=group.reward_parts | {n: part[span] for n, part in zip(parts, added, strict=True)},
            )
            for group, span in self._each()
        ]

    def with_advantages(self, advantages: Floats) -> list[TrajectoryGroup]:
        """The same groups with `advantages` [B]: the value of each sequence on its tokens that train, 0 elsewhere.

        Raises:
            InvalidRecord: one is not finite.
        """
        column = as_column("advantages", advantages, np.float32)
        check_axes({"advantages": column}, {"advantages": GROUP_RULES["advantages"]}, {})
        return [msgspec.structs.replace(group, advantages=_spread(column[span], group)) for group, span in self._each()]

    def _each(self) -> zip[tuple[TrajectoryGroup, slice]]:
        return zip(self.groups, self._spans, strict=True)


def live_sequences(group: TrajectoryGroup) -> NDArray[np.bool_]:
    """[S] which sequences have a token that trains."""
    starts, filled = group.offsets[:-1], group.offsets[1:] > group.offsets[:-1]
    live = np.zeros(len(group), np.bool_)
    live[filled] = np.logical_or.reduceat(group.loss_mask, starts[filled])
    return live


def _spread(per_sequence: NDArray[np.float32], group: TrajectoryGroup) -> NDArray[np.float32]:
    """[N]."""
    column = np.repeat(per_sequence, group.lengths())
    column[~group.loss_mask] = 0
    freeze([column])
    return column
