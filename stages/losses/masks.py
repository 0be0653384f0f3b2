"""Masks: a policy term without the sequences, or the tokens, that the policy would hardly have sampled.

`term * GeometricMask()`; with a weight, `term * ImportanceWeight() * GeometricMask()`. A mask does not correct, it
leaves out: every policy term may have one or several, those against the behavior policy too. Masked tokens have value 0
and still count in the denominator of a mean, so that micro-batches add up; their number is not known before the last.

They are masked for the difference between the policy that a term assumes to have sampled (see `ImportanceWeight`) and
the one that did. `OffPolicyMask` compares the policy in training with the one that sampled.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from ..._pipeline.errors import InvalidConfig
from ..._schemas.numbers import number_or_nan
from .choices import TokenChoice
from .importance import Weighted
from .metrics import Mean
from .policy import PolicyTerm
from .scored import Scored, clamped
from .terms import PerToken, Term


class Mask(ABC):
    """A rule for the tokens that a policy term leaves out: `term * mask`."""

    __slots__ = ()

    name: ClassVar[str]
    """Name in the metric `masked/<name>`, the share of tokens that are masked."""

    @property
    def needs_columns(self) -> tuple[str, ...]:
        """Return the columns that the rule needs: at least the log-probabilities that every mask compares with."""
        return ("behavior_logprobs",)

    @property
    def choices(self) -> tuple[TokenChoice, ...]:
        """Return the rules whose tokens `masked` reads; by default none."""
        return ()

    @abstractmethod
    def masked(self, log_ratio: Tensor, scored: Scored, /) -> Tensor:
        """Return [T] true on the tokens that are left out; `log_ratio` [T] is that of the assumed to the actual policy.

        Raises:
            InvalidRecord: the batch lacks a column that this rule needs.
        """

    def __rmul__(self, term: Maskable) -> Masked:
        return Masked(term, self) if isinstance(term, PolicyTerm | Weighted | Masked) else NotImplemented


@dataclass(frozen=True, slots=True)
class GeometricMask(Mask):
    """Mask sequences whose geometric mean of π_t/π_behavior over their tokens is outside [low, high].

    It does not depend on the length, as a product would. SkyRL's sequence mask "geometric", and verl's `seq_mean_k1` of
    the inverse: its "a_b" is low = 1/b, high = 1/a.
    """

    low: float = 0.99
    high: float = 1.01

    name: ClassVar[str] = "geometric"

    def __post_init__(self) -> None:
        _check_bounds(self.low, self.high)

    def masked(self, log_ratio: Tensor, scored: Scored, /) -> Tensor:
        """Return the tokens that are left out; see `Mask`."""
        return scored.spread(_outside(scored.sequence_means(log_ratio), self.low, self.high))


@dataclass(frozen=True, slots=True)
class ProductMask(Mask):
    """Mask sequences whose product of π_t/π_behavior over their tokens is outside [low, high].

    The ratio of the whole sequence, which grows with its length. SkyRL's sequence mask "product", and verl's
    `seq_sum_k1` of the inverse: its "a_b" is low = 1/b, high = 1/a.
    """

    low: float = 0.5
    high: float = 2.0

    name: ClassVar[str] = "product"

    def __post_init__(self) -> None:
        _check_bounds(self.low, self.high)

    def masked(self, log_ratio: Tensor, scored: Scored, /) -> Tensor:
        """Return the tokens that are left out; see `Mask`."""
        return scored.spread(_outside(scored.sequence_sums(log_ratio), self.low, self.high))


@dataclass(frozen=True, slots=True)
class TokenMask(Mask):
    """Mask tokens whose π_t/π_behavior is outside [low, high]; the others of their sequence stay.

    IcePop without its weight: verl's `token_k1` of the inverse, "a_b" for low = 1/b and high = 1/a, and SkyRL's token
    mask.
    """

    low: float = 0.5
    high: float = 2.0

    name: ClassVar[str] = "token"

    def __post_init__(self) -> None:
        _check_bounds(self.low, self.high)

    def masked(self, log_ratio: Tensor, scored: Scored, /) -> Tensor:  # noqa: ARG002 (each token for itself)
        """Return the tokens that are left out; see `Mask`."""
        return _outside(log_ratio, self.low, self.high)


@dataclass(frozen=True, slots=True)
class WorstTokenMask(Mask):
    """Mask sequences with a token whose π_t/π_behavior is outside [low, high].

    One token that the trainer finds impossible shows that engine and trainer disagree about the sequence. SkyRL's
    outlier mask, and verl's `seq_max_k2` c: low = exp(−√(2 c)), high = exp(√(2 c)).
    """

    low: float = 1e-4
    high: float = 100.0

    name: ClassVar[str] = "worst_token"

    def __post_init__(self) -> None:
        _check_bounds(self.low, self.high)

    def masked(self, log_ratio: Tensor, scored: Scored, /) -> Tensor:
        """Return the tokens that are left out; see `Mask`."""
        outside = _outside(log_ratio, self.low, self.high)
        return scored.spread(scored.sequence_sums(outside.to(log_ratio.dtype)) > 0)


@dataclass(frozen=True, slots=True)
class OffPolicyMask(Mask):
    """Mask tokens with A < 0 in sequences whose mean of log π_behavior/π over the tokens is above `most_kl`.

    Off-policy sequence masking of DeepSeek-V3.2 (arXiv:2512.02556), in TRL `off_policy_mask_threshold`: the policy
    learns from mistakes that it would make itself; sequences with A >= 0 stay. π is the policy in training, so that
    later updates on a batch may mask more.
    """

    most_kl: float

    name: ClassVar[str] = "off_policy"

    def __post_init__(self) -> None:
        if not 0 < number_or_nan(self.most_kl) < math.inf:
            raise InvalidConfig(f"most_kl: expected a positive number of nats per token, got {self.most_kl}")

    @property
    def needs_columns(self) -> tuple[str, ...]:
        """Return the columns that the rule needs; see `Mask`."""
        return ("behavior_logprobs", "advantages")

    def masked(self, log_ratio: Tensor, scored: Scored, /) -> Tensor:  # noqa: ARG002 (it is of another policy)
        """Return the tokens that are left out; see `Mask`."""
        divergence = -scored.sequence_means(scored.log_ratio("behavior").detach())
        return scored.spread(divergence > self.most_kl) & (scored.advantage() < 0)


@dataclass(frozen=True, slots=True, repr=False)
class Masked(Term):
    """A policy term without some tokens: `term * mask`."""

    term: Maskable
    mask: Mask

    def __repr__(self) -> str:
        return f"{self.term!r} * {self.mask!r}"

    @property
    def reported_as(self) -> str:
        """Return the name of the masked term; see `Term`."""
        return self.term.reported_as

    @property
    def needs_columns(self) -> tuple[str, ...]:
        """Return the columns of the term and of the mask; see `Term`."""
        return (*self.term.needs_columns, *self.mask.needs_columns)

    @property
    def choices(self) -> tuple[TokenChoice, ...]:
        """Return the rules of the term and of the mask; see `Term`."""
        return (*self.term.choices, *self.mask.choices)

    def uncorrected(self, scored: Scored, /) -> Tensor:
        """Return the log-ratio of the masked term; see `PolicyTerm`."""
        return self.term.uncorrected(scored)

    def per_token(self, scored: Scored, /) -> PerToken:
        """Return values, 0 where masked; see `Term`. `masked/<name of the mask>`: share of tokens that are masked."""
        values, metrics = self.term.per_token(scored)
        masked = self.mask.masked(self.uncorrected(scored), scored)
        share = Mean(scored.token_mean(masked.to(values.dtype)))
        return PerToken(torch.where(masked, 0.0, values), {**metrics, f"masked/{self.mask.name}": share})


Maskable: TypeAlias = PolicyTerm | Weighted | Masked
"""A term that can be masked."""


def _check_bounds(low: float, high: float) -> None:
    if not 0 <= number_or_nan(low) < 1 < number_or_nan(high) or (low == 0 and math.isinf(high)):
        raise InvalidConfig(f"low, high: expected a bound, with 0 <= low < 1 < high, got {low} and {high}")


def _outside(log_ratio: Tensor, low: float, high: float) -> Tensor:
    """Return true where exp(log_ratio) is outside [low, high]."""
    ratio = clamped(log_ratio).exp()
    return (ratio < low) | (ratio > high)
