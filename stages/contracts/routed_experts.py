"""RoutedExperts: the shape of the record that an inference server returns of the experts of a mixture.

Knows no torch; see `routing.py` for the experts of a call of a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..._schemas.numbers import normalize_counts

RouterReplay: TypeAlias = Literal["R2", "R3"]
"""The experts of a trainer's tokens: R3, those of the engine that sampled; R2, those of its own first pass over a
batch, which later updates keep. Tokens of R3 without a record are as in R2. The names are the paper's, and verl's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """The layers and experts of a model, as its configuration has them; a record of another shape is refused.

    Raises:
        InvalidConfig: a number that is not whole, or below 1; or more experts are chosen than there are.
    """

    layers: int
    """All layers of the model, those without experts included: servers return a row for each."""
    chosen: int
    """Experts that a layer chooses for a token."""
    experts: int
    """Experts of a layer."""

    def __post_init__(self) -> None:
        normalize_counts(self, "layers", "chosen", "experts")
