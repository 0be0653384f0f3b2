"""Importance weights: a correction for samples of another policy than the one that a term assumes.

Samples are of another policy if they are stale, or if the numerics of the engine differ from those of the trainer. No
gradient flows through the weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from ..._pipeline.errors import InvalidConfig
from ..._schemas.choices import check_choice
from ..._schemas.numbers import number_or_nan
from .choices import TokenChoice
from .metrics import Mean, Metric, weights_metrics
from .policy import PolicyTerm
from .scored import Scored, clamped
from .terms import PerToken, Term

Level: TypeAlias = Literal["token", "sequence", "geometric"]
"""The ratio of a weight: the token's, or the product or the geometric mean over the sequence's tokens that train."""

Beyond: TypeAlias = Literal["truncate", "mask"]
"""The rule for a weight beyond its bounds: set it to the bound, or to 0."""


@dataclass(frozen=True, slots=True)
class ImportanceWeight:
    """w = π_t/π_behavior within [low, high], where π_t is the policy that the term assumes to have sampled.

    π_t is the proximal policy for terms with `old="proximal"`, and the current one for `AdvantageWeighted`. "truncate"
    is truncated importance sampling (Ionides, 2008; Yao et al., "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training", 2025), "mask" with both bounds that of IcePop (Ling team, 2025): a token out of bounds
    has weight 0, and still counts in the denominator of a mean, so that micro-batches add up. The bounds are on w, not
    on its logarithm. A sequence's w is a product of many ratios: use wide bounds, or few are within. Its geometric mean
    does not grow with the length; it is biased.

    Raises:
        InvalidConfig: bounds with no 1 between them, or an unknown level or form.
    """

    high: float = 2.0
    low: float = 0.0
    level: Level = "token"
    beyond: Beyond = "truncate"

    def __post_init__(self) -> None:
        if not 0 <= number_or_nan(self.low) <= 1 <= number_or_nan(self.high) or self.low == self.high:
            raise InvalidConfig(
                f"expected bounds with 1 between them, 0 <= low <= 1 <= high, got {self.low} and {self.high}"
            )
        check_choice("level", self.level, Level)
        check_choice("beyond", self.beyond, Beyond)
        if self.beyond == "mask" and self.low == 0 and math.isinf(self.high):
            raise InvalidConfig("high: expected a bound, here or in low, with beyond='mask', got none")

    def __rmul__(self, term: PolicyTerm) -> Weighted:
        return Weighted(term, self) if isinstance(term, PolicyTerm) else NotImplemented


@dataclass(frozen=True, slots=True, repr=False)
class Weighted(Term):
    """A policy term times an importance weight: `term * ImportanceWeight()`.

    Raises:
        InvalidConfig: the term itself corrects for samples of another policy.
    """

    term: PolicyTerm
    weight: ImportanceWeight

    def __post_init__(self) -> None:
        if self.term.corrects:
            raise InvalidConfig(
                f"{self.term!r}: expected a term that leaves samples of another policy uncorrected, got one whose "
                f'ratio is π/π_behavior: a weight would correct twice. Use old="proximal", or omit the weight'
            )

    def __repr__(self) -> str:
        return f"{self.term!r} * {self.weight!r}"

    @property
    def reported_as(self) -> str:
        """Return the name of the weighted term; see `Term`."""
        return self.term.reported_as

    @property
    def needs_columns(self) -> tuple[str, ...]:
        """Return the columns of the term, and the log-probabilities that the weight compares with; see `Term`."""
        return (*self.term.needs_columns, "behavior_logprobs")

    @property
    def choices(self) -> tuple[TokenChoice, ...]:
        """Return the rules of the term; see `Term`."""
        return self.term.choices

    def uncorrected(self, scored: Scored, /) -> torch.Tensor:
        """Return the log-ratio that the weight corrects; see `PolicyTerm`."""
        return self.term.uncorrected(scored)

    def per_token(self, scored: Scored, /) -> PerToken:
        """Return weighted values; see `Term`. `importance/…`: unbounded weights, shares beyond `/low` and `/high`."""
        values, metrics = self.term.per_token(scored)
        log_ratio = self.uncorrected(scored)
        if self.weight.level == "sequence":
            log_ratio = scored.spread(scored.sequence_sums(log_ratio))
        elif self.weight.level == "geometric":
            log_ratio = scored.spread(scored.sequence_means(log_ratio))
        ratio = clamped(log_ratio).exp()
        low, high = ratio < self.weight.low, ratio > self.weight.high
        weights = ratio.clamp(self.weight.low, self.weight.high)
        if self.weight.beyond == "mask":
            weights = torch.where(low | high, 0.0, weights)
        return PerToken(values * weights, {**metrics, **_metrics(ratio, low, high, scored)})


def _metrics(ratio: torch.Tensor, low: torch.Tensor, high: torch.Tensor, scored: Scored) -> dict[str, Metric]:
    beyond: dict[str, Metric] = {
        f"importance/{name}": Mean(scored.token_mean(which.to(ratio.dtype)))
        for name, which in (("low", low), ("high", high))
    }
    return weights_metrics("importance", ratio, scored) | beyond
