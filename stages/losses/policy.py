"""Policy terms: they make tokens likelier or less likely, according to the advantage A of each token.

Every ratio is π/π_old. `old` is "behavior", the policy that sampled (its log-probabilities come with the data), or
"proximal", the policy when training on the batch began. With the former, the ratio both bounds the step and corrects
for stale samples; with the latter it only bounds the step, and an `ImportanceWeight` can correct for stale samples.

Knows no model, no optimizer, no batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from ..._pipeline.errors import InvalidConfig
from ..._schemas.choices import check_choice
from ..._schemas.numbers import normalize_numbers, number_or_nan
from .metrics import Mean, Metric
from .scored import OldPolicy, Scored
from .terms import PerToken, Term

Divergence: TypeAlias = Literal["tv", "kl"]
"""The divergence of π from π_old over two outcomes, the token and any other: total variation, or KL(π_old ‖ π)."""


TINY = 1e-8
"""Added to the probability of other tokens before its logarithm, as verl and SkyRL do."""

LARGEST_LOG_RATIO = 80.0
"""Bound on log-ratios if ratios have none: their products with advantages and log-probabilities stay finite."""


class PolicyTerm(Term):
    """A term that can be weighted for samples of another policy: `term * ImportanceWeight()`."""

    __slots__ = ()

    name: ClassVar[str] = "policy"

    @property
    def corrects(self) -> bool:
        """Return whether the term itself corrects for samples of another policy, so that a weight would do it twice."""
        return False

    def uncorrected(self, scored: Scored, /) -> Tensor:
        """Return [T] the log-ratio that a weight must correct: of the assumed to the actual sampling policy.

        Raises:
            InvalidRecord: the batch lacks the behavior log-probabilities.
        """
        return scored.proximal() - scored.behavior()


class RatioTerm(PolicyTerm):
    """A policy term with the ratio π/π_old."""

    __slots__ = ()

    old: OldPolicy

    @property
    def needs_columns(self) -> tuple[str, ...]:
        """Return the advantages, and the column of the old policy if it is the one that sampled; see `Term`."""
        return ("advantages", "behavior_logprobs") if self.old == "behavior" else ("advantages",)

    @property
    def corrects(self) -> bool:
        """Return whether `old` is "behavior"; see `PolicyTerm`."""
        return self.old == "behavior"


@dataclass(frozen=True, slots=True)
class AdvantageWeighted(PolicyTerm):
    """−A · log π(token): the plain policy gradient, REINFORCE with the baseline of the advantages.

    Williams, "Simple statistical gradient-following algorithms" (1992). With A = 1 it is supervised fine-tuning. It is
    correct on policy only: with stale samples, weight it (`* ImportanceWeight()`), or use a term that bounds the step.
    """

    @property
    def needs_columns(self) -> tuple[str, ...]:
        """Return the advantages; see `Term`."""
        return ("advantages",)

    def uncorrected(self, scored: Scored, /) -> Tensor:
        """Return the log-ratio of the current policy; see `PolicyTerm`."""
        return scored.log_ratio("behavior").detach()

    def per_token(self, scored: Scored, /) -> PerToken:
        """Return the value of each token; see `Term`."""
        return PerToken(-scored.advantage() * scored.logprobs, {})


@dataclass(frozen=True, slots=True)
class PPOClip(RatioTerm):
    """−min(r · A, clip(r, 1 − clip_low, 1 + clip_high) · A), where r = π/π_old of each token.

    Schulman et al., "Proximal Policy Optimization" (2017). `clip_high` above `clip_low` is clip-higher of DAPO (Yu et
    al., 2025). `dual_clip` c bounds the value of a token by −c · A where A < 0 (Ye et al., "Mastering Complex Control
    in MOBA Games", 2020); c is above 1, and 3 is usual. Against the proximal policy and weighted, it is the decoupled
    objective of Hilton et al., "Batch size-invariance for policy optimization" (2021). Log-ratios are clamped to ±20.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    old: OldPolicy = "behavior"

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high)
        check_choice("old", self.old, OldPolicy)
        if self.dual_clip is not None and not number_or_nan(self.dual_clip) > 1:
            raise InvalidConfig(f"expected dual_clip above 1, got {self.dual_clip}")

    def per_token(self, scored: Scored, /) -> PerToken:
        """Return token values; see `Term`. `pg_clipfrac`: share clipped; by bound `/low`, `/high`, `/dual`."""
        ratio, advantages = scored.ratio(self.old), scored.advantage()
        values, at = clipped(ratio, ratio, (1 - self.clip_low, 1 + self.clip_high), scored)
        if self.dual_clip is not None:
            bound = -self.dual_clip * advantages
            at["dual"] = (advantages < 0) & (values > bound)
            values = torch.where(at["dual"], bound, values)
        return PerToken(values, clip_fractions(at, scored))


@dataclass(frozen=True, slots=True)
class CISPO(RatioTerm):
    """−clip(r, lowest, highest) · A · log π(token), where r = π/π_old of each token, and no gradient flows through it.

    MiniMax, "MiniMax-M1" (2025). Clipped tokens keep their gradient. The bounds are on the ratio itself: for the ε of
    verl and SkyRL, `lowest` = 1 − ε, `highest` = 1 + ε; TRL's epsilon_high is `highest`.
    """

    lowest: float = 0.0
    highest: float = 5.0
    old: OldPolicy = "behavior"

    def __post_init__(self) -> None:
        if not 0 <= number_or_nan(self.lowest) < 1 < number_or_nan(self.highest):
            raise InvalidConfig(f"expected 0 <= lowest < 1 < highest, got {self.lowest} and {self.highest}")
        check_choice("old", self.old, OldPolicy)

    def per_token(self, scored: Scored, /) -> PerToken:
        """Return the value of each token; see `Term`. Metrics as of `PPOClip`, for either sign of the advantage."""
        ratio = scored.ratio(self.old).detach()
        values = -ratio.clamp(self.lowest, self.highest) * scored.advantage() * scored.logprobs
        return PerToken(values, clip_fractions({"low": ratio < self.lowest, "high": ratio > self.highest}, scored))


@dataclass(frozen=True, slots=True)
class DPPO(RatioTerm):
    """−min(r, highest) · A · log π(token) where π is within its bounds, 0 elsewhere; no gradient flows through r.

    Qi et al., "Rethinking the Trust Region in LLM Reinforcement Learning" (arXiv:2602.04879). The probability decides:
    the ratio of a rare token changes much, that of a probable one hardly. Let d be the divergence between π and π_old
    over two outcomes, the token and any other: "tv" is |π − π_old|, "kl" is
    π_old log(π_old/π) + (1 − π_old) log((1 − π_old)/(1 − π)). A token has value 0 where A > 0, π > π_old and
    d > `high`, or A < 0, π < π_old and d > `low`; it still counts in the mean. `highest` truncates r, as in the paper
    and verl; with `math.inf`, or if no ratio is above it, the gradient is that of SkyRL and prime-rl (their value is
    −r · A), up to ratios of e^80. The divergences over the K most probable tokens are left out, as in these libraries.
    """

    divergence: Divergence = "tv"
    low: float = 0.2
    high: float = 0.2
    highest: float = 20.0
    old: OldPolicy = "behavior"

    def __post_init__(self) -> None:
        check_choice("divergence", self.divergence, Divergence)
        check_choice("old", self.old, OldPolicy)
        if not (number_or_nan(self.low) > 0 and number_or_nan(self.high) > 0 and number_or_nan(self.highest) > 1):
            raise InvalidConfig(
                f"expected low > 0, high > 0 and highest > 1, got {self.low}, {self.high} and {self.highest}"
            )

    def per_token(self, scored: Scored, /) -> PerToken:
        """Return token values; see `Term`. `pg_clipfrac`: share with value 0; by bound `/low`, `/high`."""
        advantages = scored.advantage()
        ratio = scored.log_ratio(self.old).detach().clamp(max=LARGEST_LOG_RATIO).exp()
        change, divergence = self._divergences(scored)
        at = {
            "low": (advantages < 0) & (change < 0) & (divergence > self.low),
            "high": (advantages > 0) & (change > 0) & (divergence > self.high),
        }
        values = -ratio.clamp(max=self.highest) * advantages * scored.logprobs
        return PerToken(torch.where(at["low"] | at["high"], 0.0, values), clip_fractions(at, scored))

    @torch.no_grad()
    def _divergences(self, scored: Scored) -> tuple[Tensor, Tensor]:
        """Return [T] π − π_old, and [T] the divergence."""
        before = (scored.proximal() if self.old == "proximal" else scored.behavior()).exp().clamp(max=1.0)
        now = scored.logprobs.exp().clamp(max=1.0)  # rounding may bring both above 1, of which "kl" has no logarithm
        change = now - before
        if self.divergence == "tv":
            return change, change.abs()
        others = torch.log((1 - before + TINY) / (1 - now + TINY))
        return change, (1 - before) * others - before * scored.log_ratio(self.old)


@dataclass(frozen=True, slots=True)
class SAPO(RatioTerm):
    """−σ(τ (r − 1)) · 4/τ · A, where r = π/π_old of each token, σ the sigmoid, and τ depends on the sign of A.

    Gao et al., "Soft Adaptive Policy Optimization" (arXiv:2511.20347): a smooth gate instead of a clip. The gradient is
    that of −r · A times 4 σ (1 − σ): 1 for r = 1, and falling to 0 on both sides, the faster the larger τ. τ is
    `tau_pos` where A > 0, and `tau_neg` elsewhere. Sequences weigh the same in the paper:
    `aggregated("seq-mean-token-mean")`.
    """

    tau_pos: float = 1.0
    tau_neg: float = 1.05
    old: OldPolicy = "behavior"

    def __post_init__(self) -> None:
        normalize_numbers(self, "tau_pos", "tau_neg")
        check_choice("old", self.old, OldPolicy)

    def per_token(self, scored: Scored, /) -> PerToken:
        """Return the value of each token; see `Term`. `gate`: mean of 4 σ (1 − σ), the share of the gradient left."""
        advantages = scored.advantage()
        tau = torch.where(advantages > 0, advantages.new_tensor(self.tau_pos), advantages.new_tensor(self.tau_neg))
        gates = torch.sigmoid(tau * (scored.ratio(self.old) - 1))
        left = scored.token_mean((4 * gates * (1 - gates)).detach())
        return PerToken(-gates * 4 / tau * advantages, {"gate": Mean(left)})


def check_clip(low: float, high: float) -> None:
    """Raise InvalidConfig if these are no bounds on the change of a ratio."""
    if not (0 < number_or_nan(low) < 1 and number_or_nan(high) > 0):
        raise InvalidConfig(f"expected 0 < clip_low < 1 and clip_high > 0, got {low} and {high}")


def clipped(
    ratio: Tensor, detached: Tensor, bounds: tuple[float, float], scored: Scored
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return [T] −min(r · A, clip(r) · A), and [T] true on tokens at each bound."""
    low, high = bounds
    advantages = scored.advantage()
    values = torch.maximum(-ratio * advantages, -ratio.clamp(low, high) * advantages)
    return values, {"low": (detached < low) & (advantages < 0), "high": (detached > high) & (advantages > 0)}


def clip_fractions(at: Mapping[str, Tensor], scored: Scored) -> dict[str, Metric]:
    """Return the share of tokens at each bound, and at any; no token is at two."""
    shares = {name: scored.token_mean(which.to(scored.logprobs.dtype)) for name, which in at.items()}
    every = Mean(sum(shares.values(), scored.logprobs.new_zeros(())))
    return {"pg_clipfrac": every, **{f"pg_clipfrac/{name}": Mean(share) for name, share in shares.items()}}
