"""Demands: what the environments that count ask for together, and what each has for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .environments import Environment
from .group_queue import NOBODY
from .turns import LEAST_PART, parts

__all__ = ["Demands"]

NOBODYS_WEIGHT = 1.0
"""Of groups that come without the id of an environment, together: what environments have by default."""


@dataclass(frozen=True, slots=True)
class Demands:
    """As of the last time that somebody came, left, or was heard of again."""

    parts: Mapping[int, float]
    """Of what is handed out, by lane."""
    least: Mapping[int, int]
    """Sequences of a batch that environments are to have, of those that asked for a minimum."""
    unallocated: float
    """The part of a batch that no environment has as its minimum."""
    group_sizes: frozenset[int]
    """Sequences of groups that environments said they would send."""
    tokens_by_weight: float
    """The sum of longest sequence times weight."""

    @classmethod
    def of(cls, envs: Sequence[Environment[Any]], batch_size: int) -> Demands:
        """What these ask for."""
        minima = {env.env_id: max(0.0, env.minimum) for env in envs if env.minimum is not None}
        return cls(
            parts=parts({NOBODY: NOBODYS_WEIGHT, **{env.env_id: env.weight for env in envs}}, minima),
            least={lane: int(batch_size * minimum) for lane, minimum in minima.items()},
            unallocated=1.0 - min(1.0, sum(minima.values())),
            group_sizes=frozenset(env.buffer.group_size for env in envs),
            tokens_by_weight=sum(env.max_token_length * max(0.0, env.weight) for env in envs),
        )

    def weight(self, env: Environment[Any]) -> float:
        """The part of one environment among all, by tokens, as it is told it."""
        if not self.tokens_by_weight:
            return LEAST_PART
        return max(LEAST_PART, env.max_token_length * env.weight / self.tokens_by_weight)
