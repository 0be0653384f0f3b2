"""Policy terms whose ratio is that of a sequence, not of a token; see `policy`.

The ratio is a number of the sequence, and its gradient that of the token, so that tokens of one sequence may have
advantages of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._schemas.choices import check_choice
from ..._schemas.numbers import normalize_numbers
from .metrics import Mean
from .policy import RatioTerm, check_clip, clip_fractions, clipped
from .scored import OldPolicy, Scored, clamped
from .terms import PerToken

LEAST_LOG_WEIGHT = math.log(1e-8)
"""Bound on the logarithm of a sequence's ratio from below, as in the implementation of VESPO's authors and in TRL."""


@dataclass(frozen=True, slots=True)
class GSPO(RatioTerm):
    """−min(s · A, clip(s, 1 − clip_low, 1 + clip_high) · A), where s = exp(mean log π/π_old over a sequence's tokens).

    Zheng et al., "Group Sequence Policy Optimization" (2025), in the form they call GSPO-token: the value of s is the
    sequence's, its gradient that of the token, so that tokens of one sequence may have advantages of their own. If
    they are equal, it is GSPO. Sequences weigh the same with `aggregated("seq-mean-token-mean")`, as in the paper.

    Bounds as narrow as these require an old policy that the trainer itself scored, hence "proximal": the difference
    between the log-probabilities of an engine and of the trainer is larger, and would clip unchanged tokens.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    old: OldPolicy = "proximal"

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high)
        check_choice("old", self.old, OldPolicy)

    def per_token(self, scored: Scored, /) -> PerToken:
        """Return the value of each token; see `Term`. Metrics as of `PPOClip`."""
        log_ratio = scored.log_ratio(self.old).detach()
        ratio = scored.spread(clamped(scored.sequence_means(log_ratio)).exp())
        moving = ratio * (scored.logprobs - scored.logprobs.detach()).exp()
        values, at = clipped(moving, ratio, (1 - self.clip_low, 1 + self.clip_high), scored)
        return PerToken(values, clip_fractions(at, scored))


@dataclass(frozen=True, slots=True)
class GMPO(RatioTerm):
    """−g · A, where g = exp(mean over the sequence of log π/π_old, of each token clipped to [−clip_low, clip_high]).

    Zhao et al., "Geometric-Mean Policy Optimization" (arXiv:2507.20673). A token is clipped where its log-ratio is
    beyond the bound in the direction of A, and has no gradient then. The bounds are on the logarithm, and wide: 0.4 is
    the paper's. Sequences weigh the same with `aggregated("seq-mean-token-mean")`, as in the paper; with
    `counted="all"` too it is verl's `geo_mean` for tokens of one advantage.
    """

    clip_low: float = 0.4
    clip_high: float = 0.4
    old: OldPolicy = "behavior"

    def __post_init__(self) -> None:
        normalize_numbers(self, "clip_low", "clip_high")
        check_choice("old", self.old, OldPolicy)

    def per_token(self, scored: Scored, /) -> PerToken:
        """Return the value of each token; see `Term`. Metrics as of `PPOClip`."""
        advantages, log_ratio = scored.advantage(), scored.log_ratio(self.old)
        at = {
            "low": (log_ratio < -self.clip_low) & (advantages < 0),
            "high": (log_ratio > self.clip_high) & (advantages > 0),
        }
        within = torch.where(at["low"] | at["high"], log_ratio.clamp(-self.clip_low, self.clip_high), log_ratio)
        ratio = scored.spread(clamped(scored.sequence_means(within.detach())).exp())
        values = -ratio * (within - within.detach()).exp() * advantages
        return PerToken(values, clip_fractions(at, scored))


@dataclass(frozen=True, slots=True)
class VESPO(RatioTerm):
    """−φ(w) · A · log π(token), where w is the product of π/π_old over the sequence; no gradient flows through φ.

    "Variational Sequence-level Soft Policy Optimization" (2026), in TRL `vespo`: φ(w) = e^λ · w^k · e^(−λ w), which is
    1 on policy, rises to w = k/λ and falls to 0 on both sides, in place of a clip. k and λ are `k_pos` and `lambda_pos`
    where A >= 0, `k_neg` and `lambda_neg` elsewhere.
    """

    k_pos: float = 2.0
    lambda_pos: float = 3.0
    k_neg: float = 3.0
    lambda_neg: float = 2.0
    old: OldPolicy = "behavior"

    def __post_init__(self) -> None:
        normalize_numbers(self, "k_pos", "lambda_pos", "k_neg", "lambda_neg")
        check_choice("old", self.old, OldPolicy)

    def per_token(self, scored: Scored, /) -> PerToken:
        """Return the value of each token; see `Term`. `phi`: mean of φ."""
        advantages = scored.advantage()
        of_sequence = scored.sequence_sums(clamped(scored.log_ratio(self.old).detach()))
        log_weight = scored.spread(clamped(of_sequence).clamp(min=LEAST_LOG_WEIGHT))
        k = _by_sign(advantages, self.k_pos, self.k_neg)
        rate = _by_sign(advantages, self.lambda_pos, self.lambda_neg)
        phi = (rate + k * log_weight - rate * log_weight.exp()).exp()
        return PerToken(-phi * advantages * scored.logprobs, {"phi": Mean(scored.token_mean(phi))})


def _by_sign(advantages: Tensor, positive: float, negative: float) -> Tensor:
    """Return [T] `positive` where the advantage is at least 0, and `negative` elsewhere."""
    return torch.where(advantages >= 0, advantages.new_tensor(positive), advantages.new_tensor(negative))
