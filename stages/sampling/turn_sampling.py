"""`TurnSampling`: the sampling parameters of each turn of a rollout, and the facts about them in the `meta` of groups.

Knows no environment and no engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..contracts.policies import Completion
from ..contracts.sampling_params import TEMPERATURES, SamplingParams
from .environments import RolloutResult
from .rollout_columns import tokens_of


@dataclass(frozen=True, slots=True)
class TurnSampling:
    """The sampling parameters of the turns of a rollout."""

    by_turn: tuple[SamplingParams, ...]
    """Those of each turn, at least one; the last are those of all later turns."""

    def requested(self, end_ids: Iterable[int], seed: int | None) -> TurnSampling:
        """Return the parameters of requests: they end at `end_ids` too, and have `seed` if they had none."""
        return TurnSampling(tuple(each.ending_at(end_ids).seeded_by(seed) for each in self.by_turn))

    def at(self, turn: int) -> SamplingParams:
        """Return the parameters of a turn of the policy, from 0 on."""
        return self.by_turn[min(turn, len(self.by_turn) - 1)]

    @property
    def recorded(self) -> dict[str, Any]:
        """Return the parameters that every group has in `meta`; the bound is a list if it differs between turns."""
        bounds = [sampling.max_completion_tokens for sampling in self.by_turn]
        bound: dict[str, Any] = {"max_completion_tokens": bounds if len(set(bounds)) > 1 else bounds[0]}
        return bound if self._tempers_turns else {"temperature": self.by_turn[0].logprob_temperature, **bound}

    @property
    def _tempers_turns(self) -> bool:
        """Return whether the temperature differs between turns."""
        return len({sampling.logprob_temperature for sampling in self.by_turn}) > 1

    def temperatures(self, rollouts: Mapping[int, RolloutResult]) -> dict[str, Any]:
        """Return `meta["temperatures"]` of a group: where turns differ, by repetition the parts of its sequence."""
        if not self._tempers_turns:
            return {}
        parts: list[list[tuple[int, float]] | None] = [None] * (max(rollouts) + 1)
        for repetition, rollout in rollouts.items():
            turns = itertools.accumulate((isinstance(turn, Completion) for turn in rollout.turns), initial=0)
            parts[repetition] = [
                (len(tokens_of(turn)), self.at(number).logprob_temperature)
                for turn, number in zip(rollout.turns, turns, strict=False)
            ]
        return {TEMPERATURES: parts}
