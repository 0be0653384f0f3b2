"""KL: how far the policy is from a reference policy, estimated from the tokens that were sampled; see `kl_estimate`.

That module is about values. In a term of a loss the gradient counts, and on policy (Tang and Munos,
"On a few pitfalls in KL divergence gradient estimation for RL", 2025) k2's is that of the divergence, k3's is that of
the divergence the other way round, and k1's is 0 on average. In the reward the value counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..._schemas.choices import check_choice
from ..contracts.kl_estimate import KLEstimator, kl_estimate
from .scored import Scored
from .terms import PerToken, Term


@dataclass(frozen=True, slots=True)
class KL(Term):
    """The divergence of the policy from the reference policy, per token: `0.001 * KL("k3")`.

    The reference log-probabilities come with the data (`ref_logprobs`) or from the trainer's `reference`.
    """

    estimator: KLEstimator = "k3"

    name: ClassVar[str] = "kl"

    def __post_init__(self) -> None:
        check_choice("estimator", self.estimator, KLEstimator)

    @property
    def needs_columns(self) -> tuple[str, ...]:
        """Return the column of the reference; see `Term`."""
        return ("ref_logprobs",)

    def per_token(self, scored: Scored, /) -> PerToken:
        """Return the estimate of each token; see `Term`."""
        return PerToken(kl_estimate(scored.logprobs - scored.reference(), self.estimator, torch.exp), {})
