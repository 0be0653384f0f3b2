"""Policy terms: they make tokens likelier or less likely, according to the advantage A of each token.

Every ratio is π/π_old. `old` is "behavior", the policy that sampled, whose log-probabilities came with the data, or
"proximal", the policy when training on the batch began. With the former, the ratio both bounds the step and corrects
for stale samples; with the latter it only bounds the step, and an `ImportanceWeight` can correct for stale samples.

Knows no model, no optimizer, no batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .metrics import Mean, Metric
from .scored import OldPolicy, Scored, clamped
from .terms import PerToken, Term


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
    def corrects(self) -> bool:
        """Return whether `old` is "behavior"; see `PolicyTerm`."""
        return self.old == "behavior"


@dataclass(frozen=True, slots=True)
class AdvantageWeighted(PolicyTerm):
    """−A · log π(token): the plain policy gradient, REINFORCE with whatever baseline is in the advantages.

    Williams, "Simple statistical gradient-following algorithms" (1992). With A = 1 it is supervised fine-tuning. It is
    correct on policy only: with stale samples, weight it (`* ImportanceWeight()`), or use a term that bounds the step.
    """

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
        _check_clip(self.clip_low, self.clip_high)
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"expected dual_clip above 1, got {self.dual_clip}")

    def per_token(self, scored: Scored, /) -> PerToken:
        """Return token values; see `Term`. `pg_clipfrac`: share clipped; by bound `/low`, `/high`, `/dual`."""
        ratio, advantages = scored.ratio(self.old), scored.advantage()
        values, at = _clipped(ratio, ratio, (1 - self.clip_low, 1 + self.clip_high), scored)
        if self.dual_clip is not None:
            bound = -self.dual_clip * advantages
            at["dual"] = (advantages < 0) & (values > bound)
            values = torch.where(at["dual"], bound, values)
        return PerToken(values, _clip_fractions(at, scored))


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
        _check_clip(self.clip_low, self.clip_high)

    def per_token(self, scored: Scored, /) -> PerToken:
        """Return the value of each token; see `Term`. Metrics as of `PPOClip`."""
        log_ratio = scored.log_ratio(self.old).detach()
        of_sequence = scored.sequence_sums(log_ratio) / scored.lengths.clamp(min=1)
        ratio = scored.spread(clamped(of_sequence).exp())
        moving = ratio * (scored.logprobs - scored.logprobs.detach()).exp()
        values, at = _clipped(moving, ratio, (1 - self.clip_low, 1 + self.clip_high), scored)
        return PerToken(values, _clip_fractions(at, scored))


@dataclass(frozen=True, slots=True)
class CISPO(RatioTerm):
    """−clip(r, lowest, highest) · A · log π(token), where r = π/π_old of each token, and no gradient flows through it.

    MiniMax, "MiniMax-M1" (2025). Clipped tokens keep their gradient. The bounds are on the ratio itself: what
    verl and SkyRL call ε is `lowest` = 1 − ε, `highest` = 1 + ε; TRL's epsilon_high is `highest`.
    """

    lowest: float = 0.0
    highest: float = 5.0
    old: OldPolicy = "behavior"

    def __post_init__(self) -> None:
        if not 0 <= self.lowest < 1 < self.highest:
            raise ValueError(f"expected 0 <= lowest < 1 < highest, got {self.lowest} and {self.highest}")

    def per_token(self, scored: Scored, /) -> PerToken:
        """Return the value of each token; see `Term`. Metrics as of `PPOClip`, for either sign of the advantage."""
        ratio = scored.ratio(self.old).detach()
        values = -ratio.clamp(self.lowest, self.highest) * scored.advantage() * scored.logprobs
        return PerToken(values, _clip_fractions({"low": ratio < self.lowest, "high": ratio > self.highest}, scored))


def _check_clip(low: float, high: float) -> None:
    if not (0 < low < 1 and high > 0):
        raise ValueError(f"expected 0 < clip_low < 1 and clip_high > 0, got {low} and {high}")


def _clipped(
    ratio: Tensor, detached: Tensor, bounds: tuple[float, float], scored: Scored
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return [T] −min(r · A, clip(r) · A), and [T] true on tokens at each bound."""
    low, high = bounds
    advantages = scored.advantage()
    values = torch.maximum(-ratio * advantages, -ratio.clamp(low, high) * advantages)
    return values, {"low": (detached < low) & (advantages < 0), "high": (detached > high) & (advantages > 0)}


def _clip_fractions(at: Mapping[str, Tensor], scored: Scored) -> dict[str, Metric]:
    """Return the share of tokens at each bound, and at any; no token is at two."""
    shares = {name: scored.token_mean(which.to(scored.logprobs.dtype)) for name, which in at.items()}
    every = Mean(sum(shares.values(), scored.logprobs.new_zeros(())))
    return {"pg_clipfrac": every, **{f"pg_clipfrac/{name}": Mean(share) for name, share in shares.items()}}
