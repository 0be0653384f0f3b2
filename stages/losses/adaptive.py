"""AdaptiveTerm: a term with a weight that a trainer adapts after each step; its checkpoints contain it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from ..._pipeline.errors import InvalidConfig
from .terms import Aggregated, Loss, LossTerm, Term


class AdaptiveTerm(Term):
    """A term with state. One trainer uses one object."""

    __slots__ = ()

    state_name: ClassVar[str]
    """Its name in checkpoints."""

    @abstractmethod
    def adapt(self, metrics: Mapping[str, float], sequences: int) -> dict[str, float]:
        """Adapt the weight to the `metrics` of a step with so many sequences; return the weight of that step."""

    @abstractmethod
    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state that `state_dict` returned."""


def adaptive_terms_of(loss: Loss) -> dict[str, AdaptiveTerm]:
    """Return the terms of `loss` that adapt, by their names in checkpoints.

    Raises:
        InvalidConfig: it has several of a class.
    """
    total = loss.total if isinstance(loss, Aggregated) else loss
    terms = [term for _, term in total.parts()] if isinstance(total, LossTerm) else []
    found = [term for term in terms if isinstance(term, AdaptiveTerm)]
    for kind in {type(term) for term in found}:
        if (count := sum(type(term) is kind for term in found)) > 1:
            raise InvalidConfig(f"loss: expected at most one {kind.__name__}, got {count}")
    return {term.state_name: term for term in found}
