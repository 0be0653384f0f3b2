"""Entropy of the policy, as a term of a loss: with a fixed weight, or one that holds it at a target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from ..._pipeline.errors import InvalidConfig
from ..._schemas.numbers import normalize_numbers
from .adaptive import AdaptiveTerm
from .metrics import Mean
from .scored import Scored
from .terms import PerToken, Term


@dataclass(frozen=True, slots=True)
class Entropy(Term):
    """The entropy in nats of the distribution each token was drawn from, over the whole vocabulary.

    A loss is minimised, so a bonus is subtracted: `PPOClip() - 0.01 * Entropy()`.
    """

    name: ClassVar[str] = "entropy"

    def per_token(self, scored: Scored, /) -> PerToken:
        """Return the entropy at each token; see `Term`."""
        return PerToken(scored.entropy, {})


MEASURED, WEIGHT = "adaptive_entropy/entropy", "adaptive_entropy/weight"
"""Metrics: the entropy of the policy in a step, and the weight that the step used."""


@dataclass(slots=True, eq=False)
class AdaptiveEntropy(AdaptiveTerm):
    """−c times the entropy of each token, while it is at or below a target: `PPOClip() + AdaptiveEntropy(0.2)`.

    After a step, c grows by `delta` if the mean entropy over the tokens was at most the target, and else falls by it,
    within [0, `most`]. A step has the bonus if the entropy of the one before was at most the target; the first has
    none. He et al., "Skywork Open Reasoner 1" (arXiv:2505.22312); TRL's `use_adaptive_entropy`. One trainer uses one
    object; its checkpoints contain c under the name `adaptive_entropy`.

    Args:
        target: entropy, in nats per token, that is not to be fallen below.
        weight: c of the first step.
        delta: change of c in a step.
        most: largest c.

    Raises:
        InvalidConfig: a number that is not positive, or a weight below 0 or above `most`.
    """

    target: float
    weight: float = 0.0
    delta: float = 0.005
    most: float = 1.0
    _given: float = field(init=False, repr=False)
    """The weight of the first step."""
    _applies: bool = field(default=False, init=False, repr=False)
    """True if the entropy of the step before was at most the target."""

    name: ClassVar[str] = "entropy"
    state_name: ClassVar[str] = "adaptive_entropy"

    def __post_init__(self) -> None:
        self._given = self.weight
        normalize_numbers(self, "target", "delta", "most")
        normalize_numbers(self, "weight", zero=True)
        if self.weight > self.most:
            raise InvalidConfig(f"weight: expected at most {self.most}, the largest weight, got {self.weight}")

    @property
    def _used(self) -> float:
        return self.weight if self._applies else 0.0

    def per_token(self, scored: Scored, /) -> PerToken:
        """Return −c times the entropy at each token; see `Term`."""
        measured = {MEASURED: Mean(scored.token_mean(scored.entropy.detach()))}
        return PerToken(-self._used * scored.entropy, measured)

    def adapt(self, metrics: Mapping[str, float], sequences: int) -> dict[str, float]:  # noqa: ARG002 (a step is a step)
        """Adapt c to the `metrics` of a step; return the c of that step as a metric."""
        used, self._applies = self._used, metrics[MEASURED] <= self.target
        change = self.delta if self._applies else -self.delta
        self.weight = min(max(self.weight + change, 0.0), self.most)
        return {WEIGHT: used}

    def state_dict(self) -> dict[str, float]:
        """Return c, that of the first step, and 1 if the next step has the bonus, for a checkpoint."""
        return {"weight": self.weight, "given": self._given, "applies": float(self._applies)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state that `state_dict` returned, if it began with the same c; else begin with this one."""
        if state["given"] == self._given:
            self.weight, self._applies = state["weight"], bool(state["applies"])
