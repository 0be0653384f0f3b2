"""The configuration of LoRA adapters; needs no torch."""

from __future__ import annotations

from ..._pipeline.errors import InvalidConfig
from ..._schemas.config import Config
from ..._schemas.numbers import finite_number, normalize_counts


class LoRA(Config, frozen=True):
    """Low-rank adapters of linear layers: these alone train, are published and are saved; the model itself is frozen.

    Raises:
        InvalidConfig: `rank` is not a whole number from 1 on, `alpha` is not above 0, or `dropout` is not from 0 to
            below 1.
    """

    rank: int = 16
    """Rank of each adapter."""
    alpha: float = 32
    """An adapter's output is multiplied by alpha / rank."""
    dropout: float = 0.0
    """Share of an adapter's inputs that are set to 0 while training."""
    targets: str | tuple[str, ...] = "all-linear"
    """Names of the layers, such as `("q_proj", "v_proj")`; `all-linear` for every linear layer but the head."""

    def __post_init__(self) -> None:
        normalize_counts(self, "rank")
        finite_number("alpha", self.alpha)
        if not 0 <= finite_number("dropout", self.dropout, zero=True) < 1:
            raise InvalidConfig(f"dropout: expected a share from 0 to below 1, got {self.dropout}")
