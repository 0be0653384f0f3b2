"""KL: how far the policy is from a reference policy, estimated from the tokens that were sampled; see `kl_estimate`.

That module is about values. In a term of a loss the gradient counts, and on policy (Tang and Munos,
"On a few pitfalls in KL divergence gradient estimation for RL", 2025) k2's is that of the divergence, k3's is that of
the divergence the other way round, and k1's is 0 on average. In the reward the value counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch

from ..._pipeline.errors import InvalidConfig
from ..._schemas.choices import check_choice
from ..contracts.kl_estimate import KLEstimator, kl_estimate
from .scored import OldPolicy, Scored
from .terms import PerToken, Term

TermEstimator: TypeAlias = Literal[KLEstimator, "k1+", "k3+"]
"""An estimator; with a "+" its value has the gradient of k2, which on policy is that of the divergence."""


@dataclass(frozen=True, slots=True)
class KL(Term):
    """The divergence of the policy from the reference policy, per token: `0.001 * KL("k3")`.

    The reference log-probabilities come with the data (`ref_logprobs`) or from the trainer's `reference`. "k3+" has the
    value of k3 and the gradient of k2, as verl's `low_var_kl+`. `unbiased` multiplies the estimate by π/π_old, its
    gradient included (DeepSeek-V3.2, arXiv:2512.02556; TRL's `use_bias_correction_kl`): with k1 and k3 it then
    estimates the divergence, and its gradient, from the samples of the old policy.

    Raises:
        InvalidConfig: an unknown estimator or old policy, or `unbiased` with an estimator that is biased on policy.
    """

    estimator: TermEstimator = "k3"
    unbiased: OldPolicy | None = None

    name: ClassVar[str] = "kl"

    def __post_init__(self) -> None:
        check_choice("estimator", self.estimator, TermEstimator)
        if self.unbiased is not None:
            check_choice("unbiased", self.unbiased, OldPolicy)
            if self.estimator not in {"k1", "k3"}:
                raise InvalidConfig(
                    f"estimator: expected k1 or k3 with unbiased={self.unbiased!r}, got {self.estimator!r}"
                )

    @property
    def needs_columns(self) -> tuple[str, ...]:
        """Return the column of the reference, and of the old policy if it sampled; see `Term`."""
        return ("ref_logprobs", "behavior_logprobs") if self.unbiased == "behavior" else ("ref_logprobs",)

    def per_token(self, scored: Scored, /) -> PerToken:
        """Return the estimate of each token; see `Term`."""
        log_ratio = scored.logprobs - scored.reference()
        if self.estimator == "k1+":
            return PerToken(_with_gradient_of_k2(log_ratio, "k1"), {})
        if self.estimator == "k3+":
            return PerToken(_with_gradient_of_k2(log_ratio, "k3"), {})
        estimate = kl_estimate(log_ratio, self.estimator, torch.exp)
        return PerToken(estimate if self.unbiased is None else estimate * scored.ratio(self.unbiased), {})


def _with_gradient_of_k2(log_ratio: torch.Tensor, estimator: KLEstimator) -> torch.Tensor:
    """Return the values of `estimator`; their gradient goes straight through to that of k2."""
    moving = kl_estimate(log_ratio, "k2", torch.exp)
    return moving - moving.detach() + kl_estimate(log_ratio.detach(), estimator, torch.exp)
