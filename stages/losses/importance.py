"""Importance weights: what makes up for samples of a policy that is not the one a term takes them to be of.

Samples are of another policy where they are stale, and where the engine that sampled computes otherwise than the
trainer does. The weight is a number: no gradient flows through it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

from .metrics import Mean, Metric, weights_metrics
from .policy import PolicyTerm
from .scored import Scored, clamped
from .terms import PerToken, Term

__all__ = ["Beyond", "ImportanceWeight", "Level", "Weighted"]

Level: TypeAlias = Literal["token", "sequence"]
"""Whose ratio a weight is: the token's, or the product over the sequence's tokens that train."""

Beyond: TypeAlias = Literal["truncate", "mask"]
"""What becomes of a weight beyond its bounds: it is the bound, or it is 0."""


@dataclass(frozen=True, slots=True)
class ImportanceWeight:
    """w = π_t/π_behavior within [low, high], where π_t is the policy that the weighted term takes for the sampling one.

    π_t is the proximal policy for terms with `old="proximal"`, and the current one for `AdvantageWeighted`. "truncate"
    is truncated importance sampling (Ionides, 2008; Yao et al., "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training", 2025), "mask" with both bounds that of IcePop (Ling team, 2025): a token out of bounds
    trains nothing, and still counts in what a mean divides by, so that micro-batches add up. The bounds are on w, not
    on its logarithm. A sequence's w is a product of many ratios: bound it generously, or hardly any is within.

    Raises:
        ValueError: bounds with no 1 between them, or an unknown level or form.
    """

    high: float = 2.0
    low: float = 0.0
    level: Level = "token"
    beyond: Beyond = "truncate"

    def __post_init__(self) -> None:
        if not 0 <= self.low <= 1 <= self.high or self.low == self.high:
            raise ValueError(
                f"expected bounds with 1 between them, 0 <= low <= 1 <= high, got {self.low} and {self.high}"
            )
        for name, allowed in (("level", get_args(Level)), ("beyond", get_args(Beyond))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if self.beyond == "mask" and self.low == 0 and math.isinf(self.high):
            raise ValueError("expected a bound where what is beyond it is masked, got none")

    def of(self, term: PolicyTerm) -> Weighted:
        """`term`, weighted.

        Raises:
            ValueError: the term corrects for samples of another policy by itself.
        """
        return Weighted(term, self)


@dataclass(frozen=True, slots=True, repr=False)
class Weighted(Term):
    """A policy term times an importance weight; see `ImportanceWeight.of`."""

    term: PolicyTerm
    weight: ImportanceWeight

    def __post_init__(self) -> None:
        if self.term.corrects:
            raise ValueError(
                f"{self.term!r}: expected a term that leaves samples of another policy uncorrected, got one whose "
                f'ratio is π/π_behavior: a weight would correct twice. Take old="proximal", or leave the weight out'
            )

    def __repr__(self) -> str:
        return f"{self.term!r} * {self.weight!r}"

    @property
    def reported_as(self) -> str:
        """See `Term`: that of what is weighted."""
        return self.term.reported_as

    def per_token(self, scored: Scored, /) -> PerToken:
        """See `Term`. `importance/…`: the weights before they are bounded, and the share that is `/low` and `/high`."""
        values, metrics = self.term.per_token(scored)
        log_ratio = self.term.uncorrected(scored)
        if self.weight.level == "sequence":
            log_ratio = scored.spread(scored.sequence_sums(log_ratio))
        ratio = clamped(log_ratio).exp()
        low, high = ratio < self.weight.low, ratio > self.weight.high
        weights = ratio.clamp(self.weight.low, self.weight.high)
        if self.weight.beyond == "mask":
            weights = torch.where(low | high, 0.0, weights)
        return PerToken(values * weights, {**metrics, **_said(ratio, low, high, scored)})


def _said(ratio: torch.Tensor, low: torch.Tensor, high: torch.Tensor, scored: Scored) -> dict[str, Metric]:
    beyond: dict[str, Metric] = {
        f"importance/{name}": Mean(scored.token_mean(which.to(ratio.dtype)))
        for name, which in (("low", low), ("high", high))
    }
    return weights_metrics("importance", ratio, scored) | beyond
