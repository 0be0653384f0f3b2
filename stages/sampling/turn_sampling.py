"""`TurnSampling`: the sampling parameters of each turn of a rollout, and the facts about them in the `meta` of groups.

Knows no environment and no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..contracts.policies import Call, Completion
from ..contracts.rollouts import Branch, RolloutResult, tokens_of
from ..contracts.sampling_params import TEMPERATURES, SamplingParams


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
    def support(self) -> int:
        """Return the width of the column `support_ids`; 0 for none."""
        return max(sampling.support for sampling in self.by_turn)

    def recorded(self, rollouts: Mapping[int, RolloutResult]) -> dict[str, Any]:
        """Return the facts for `meta` of a group, whose `rollouts` are by repetition.

        The bound on completions is a list if it differs between turns. The temperature is one number, or, where that of
        turns or calls differs from the first one's, `temperatures`: by repetition the parts of its sequences, one
        behind the other.
        """
        bounds = [sampling.max_completion_tokens for sampling in self.by_turn]
        recorded: dict[str, Any] = {"max_completion_tokens": bounds if len(set(bounds)) > 1 else bounds[0]}
        usual = self.by_turn[0].logprob_temperature
        if all(sampling.logprob_temperature == usual for sampling in self.by_turn) and all(
            turn.temperature == usual
            for rollout in rollouts.values()
            for sequence in rollout.sequences
            for turn in sequence.turns
            if isinstance(turn, Call)
        ):
            return {"temperature": usual, **recorded}
        parts: list[list[tuple[int, float]] | None] = [None] * (max(rollouts) + 1)
        for repetition, rollout in rollouts.items():
            parts[repetition] = [part for sequence in rollout.sequences for part in self._parts(sequence)]
        return recorded | {TEMPERATURES: parts}

    def _parts(self, sequence: Branch) -> Iterator[tuple[int, float]]:
        """Yield the length of each turn, and the temperature of its log-probabilities."""
        number = 0
        for turn in sequence.turns:
            own = turn.temperature if isinstance(turn, Call) else self.at(number).logprob_temperature
            yield len(tokens_of(turn)), own
            number += isinstance(turn, Completion)
