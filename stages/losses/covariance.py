"""ClipCov and KLCov: policy terms that hold back the tokens by which the entropy would collapse.

Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models" (arXiv:2505.22617): the
entropy falls with the covariance of log π and A, and few tokens have most of it. Covariances are those over all tokens
of the batch; verl and SkyRL compute them within each micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..._pipeline.errors import InvalidConfig
from ..._schemas.choices import check_choice
from ..._schemas.numbers import finite_number, number_or_nan
from .choices import Flags, Floats, TokenChoice, check_share, covariances, number_of
from .metrics import Mean
from .policy import RatioTerm, check_clip, clip_fractions, clipped
from .scored import OldPolicy, Scored, clamped
from .terms import PerToken

CHOSEN = "cov/chosen"
"""Metric: the share of tokens that are held back."""


@dataclass(frozen=True, slots=True)
class ClipCov(RatioTerm, TokenChoice):
    """`PPOClip`, with 0 for some tokens of a high covariance: `share` of all tokens, at random among these.

    A covariance is high between `least` and `most`, and tokens at a bound of the ratio are not chosen. `clip_cov` of
    verl and SkyRL.

    Args:
        clip_low: see `PPOClip`.
        clip_high: see `PPOClip`.
        share: of all tokens of the batch that train; rounded down, and at least one token.
        least: lower bound on the covariance.
        most: upper bound on it.
        old: see `PPOClip`.

    Raises:
        InvalidConfig: a share outside (0, 1], bounds in the wrong order, or see `PPOClip`.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    share: float = 0.0002
    least: float = 1.0
    most: float = 5.0
    old: OldPolicy = "behavior"

    measurements: ClassVar[int] = 3

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high)
        check_share(self.share)
        check_choice("old", self.old, OldPolicy)
        if not number_or_nan(self.least) < number_or_nan(self.most):
            raise InvalidConfig(f"least, most: expected least < most, got {self.least} and {self.most}")

    @property
    def choices(self) -> tuple[TokenChoice, ...]:
        """Return this rule; see `Term`."""
        return (self,)

    def measured(self, scored: Scored, /) -> Tensor:
        """Return advantages, log-probabilities, and 1 on tokens at a bound; see `TokenChoice`."""
        _, at = self._clipped(scored)
        return torch.stack([scored.advantage(), scored.logprobs, (at["low"] | at["high"]).to(scored.logprobs.dtype)], 1)

    def choose(self, measured: Floats, /) -> Flags:
        """Return the first tokens of a high covariance; see `TokenChoice`."""
        advantages, logprobs, at_a_bound = measured.T
        covariance = covariances(advantages, logprobs)
        high = (covariance > self.least) & (covariance < self.most) & (at_a_bound == 0)
        chosen: Flags = high & (high.cumsum() <= number_of(self.share, len(high)))
        return chosen

    def per_token(self, scored: Scored, /) -> PerToken:
        """Return token values; see `Term`. `pg_clipfrac` as `PPOClip`; `cov/chosen`: share of tokens that are 0."""
        values, at = self._clipped(scored)
        chosen = scored.chosen_by(self)
        share = Mean(scored.token_mean(chosen.to(values.dtype)))
        return PerToken(torch.where(chosen, 0.0, values), {**clip_fractions(at, scored), CHOSEN: share})

    def _clipped(self, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = scored.ratio(self.old)
        return clipped(ratio, ratio, (1 - self.clip_low, 1 + self.clip_high), scored)


@dataclass(frozen=True, slots=True)
class KLCov(RatioTerm, TokenChoice):
    """−r · A, and for the `share` of tokens of the highest covariance + `weight` · |log r|, where r = π/π_old.

    `kl_cov` of verl and SkyRL. Log-ratios are clamped to ±20; nothing else bounds the step.

    Args:
        share: of all tokens of the batch that train; rounded down, and at least one token.
        weight: of the divergence.
        old: see `PPOClip`.

    Raises:
        InvalidConfig: a share outside (0, 1], or a weight that is not positive.
    """

    share: float = 0.0002
    weight: float = 1.0
    old: OldPolicy = "behavior"

    measurements: ClassVar[int] = 2

    def __post_init__(self) -> None:
        check_share(self.share)
        finite_number("weight", self.weight)
        check_choice("old", self.old, OldPolicy)

    @property
    def choices(self) -> tuple[TokenChoice, ...]:
        """Return this rule; see `Term`."""
        return (self,)

    def measured(self, scored: Scored, /) -> Tensor:
        """Return advantages and log-probabilities; see `TokenChoice`."""
        return torch.stack([scored.advantage(), scored.logprobs], 1)

    def choose(self, measured: Floats, /) -> Flags:
        """Return the tokens of the highest covariance; see `TokenChoice`."""
        covariance = covariances(*measured.T)
        chosen = np.zeros(len(covariance), np.bool_)
        chosen[np.argsort(-covariance, kind="stable")[: number_of(self.share, len(covariance))]] = True
        return chosen

    def per_token(self, scored: Scored, /) -> PerToken:
        """Return the value of each token; see `Term`. `cov/chosen`: share of tokens with the divergence."""
        chosen = scored.chosen_by(self)
        log_ratio = clamped(scored.log_ratio(self.old))
        divergence = torch.where(chosen, self.weight * log_ratio.abs(), 0.0)
        share = Mean(scored.token_mean(chosen.to(log_ratio.dtype)))
        return PerToken(-scored.advantage() * log_ratio.exp() + divergence, {CHOSEN: share})
