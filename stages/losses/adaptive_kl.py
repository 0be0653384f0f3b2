"""AdaptiveKL: a KL term with a weight that follows the measured divergence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from ..._schemas.numbers import normalize_numbers, whole_number
from .adaptive import AdaptiveTerm
from .kl import KL, TermEstimator
from .metrics import Mean
from .scored import Scored
from .terms import PerToken

MEASURED, WEIGHT = "adaptive_kl/kl", "adaptive_kl/weight"
"""Metrics: the divergence of the policy from the reference in a step, and the weight that the step used."""

MOST_ERROR = 0.2
"""Bound on the relative distance to the target that counts, as in the paper."""


@dataclass(slots=True, eq=False)
class AdaptiveKL(AdaptiveTerm):
    """β times the divergence of the policy from the reference policy, per token: `PPOClip() + AdaptiveKL(0.01, 0.05)`.

    After a step with n sequences, β ← β · (1 + clip(kl / target − 1, −0.2, 0.2) · n / horizon), where kl is the mean
    over the tokens of the step: Ziegler et al., "Fine-Tuning Language Models from Human Preferences"
    (arXiv:1909.08593). It is `AdaptiveKLController` of verl and SkyRL, here for the KL in the loss. One trainer uses
    one object; its checkpoints contain β under the name `adaptive_kl`.

    Args:
        weight: β of the first step.
        target: divergence, in nats per token, that β is steered to.
        horizon: number of sequences that correct the relative error; larger is slower.
        estimator: of a token's divergence; see `KL`.

    Raises:
        InvalidConfig: a number that is not positive, or an unknown estimator.
    """

    weight: float
    target: float
    horizon: int = 10_000
    estimator: TermEstimator = "k3"
    _given: float = field(init=False, repr=False)
    """The weight of the first step."""

    name: ClassVar[str] = "kl"
    state_name: ClassVar[str] = "adaptive_kl"

    def __post_init__(self) -> None:
        KL(self.estimator)
        self._given = self.weight
        normalize_numbers(self, "weight", "target")
        self.horizon = whole_number("horizon", self.horizon)

    @property
    def needs_columns(self) -> tuple[str, ...]:
        """Return the column of the reference; see `Term`."""
        return ("ref_logprobs",)

    def per_token(self, scored: Scored, /) -> PerToken:
        """Return β times the estimate of each token; see `Term`."""
        estimates, _ = KL(self.estimator).per_token(scored)
        return PerToken(self.weight * estimates, {MEASURED: Mean(scored.token_mean(estimates.detach()))})

    def adapt(self, metrics: Mapping[str, float], sequences: int) -> dict[str, float]:
        """Adapt β to the `metrics` of a step with so many sequences; return the β of that step as a metric."""
        used = self.weight
        error = min(max(metrics[MEASURED] / self.target - 1, -MOST_ERROR), MOST_ERROR)
        self.weight *= 1 + error * sequences / self.horizon
        return {WEIGHT: used}

    def state_dict(self) -> dict[str, float]:
        """Return β, and that of the first step, for a checkpoint."""
        return {"weight": self.weight, "given": self._given}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state that `state_dict` returned, if it began with the same β; else begin with this one."""
        if state.get("given", self._given) == self._given:
            self.weight = state["weight"]
