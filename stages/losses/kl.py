"""KL: how far the policy is from a reference policy, estimated from the tokens that were sampled.

Schulman, "Approximating KL Divergence" (2020), with Δ = log π − log π_ref of a sampled token:

    k1  Δ                 unbiased, of either sign, of high variance
    k2  Δ² / 2            biased, never negative
    k3  exp(−Δ) + Δ − 1   unbiased, never negative

That is about their values. As a term of a loss, it is the gradient that counts, and on policy (Tang and Munos, "On a
few pitfalls in KL divergence gradient estimation for RL", 2025) k2's is that of the divergence, k3's is that of the
divergence the other way round, and k1's is 0 on average: it pulls nowhere. In the reward the value counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

from torch import Tensor

from ..kl_reward import Estimator
from .scored import Scored, clamped
from .terms import PerToken, Term

__all__ = ["KL", "kl_estimate"]


def kl_estimate(log_ratio: Tensor, estimator: Estimator) -> Tensor:
    """Estimates of KL(p ‖ q) from samples of p, one each, given log p/q; clamped to ±20 where it is exponentiated."""
    match estimator:
        case "k1":
            return log_ratio
        case "k2":
            return log_ratio**2 / 2
        case "k3":
            bounded = clamped(log_ratio)
            return (-bounded).exp() + bounded - 1


@dataclass(frozen=True, slots=True)
class KL(Term):
    """The divergence of the policy from the reference policy, per token: `0.001 * KL("k3")`.

    The reference log-probabilities come with the data (`ref_logprobs`) or from the trainer's `reference`.
    """

    estimator: Estimator = "k3"

    name: ClassVar[str] = "kl"

    def __post_init__(self) -> None:
        if self.estimator not in get_args(Estimator):
            raise ValueError(f"estimator: expected one of {', '.join(get_args(Estimator))}, got {self.estimator!r}")

    def per_token(self, scored: Scored, /) -> PerToken:
        """See `Term`."""
        return PerToken(kl_estimate(scored.logprobs - scored.reference(), self.estimator), {})
