"""Schedule: how far a source may sample ahead of the trainer. The pipeline knows it, and its stages obey it."""

from __future__ import annotations

from dataclasses import dataclass

from ..._schemas.bounds import Count
from ..._schemas.numbers import normalize_counts


@dataclass(frozen=True, slots=True)
class Schedule:
    """The bound on lag, and the size of a step.

    Raises:
        InvalidConfig: a number that is not whole, or too small.
    """

    max_lag: Count | None = None
    """Optimizer steps that may lie between the weights that sampled a trajectory and those that it trains; None for no
    bound."""
    per_step: Count | None = None
    """Trajectories that each optimizer step trains, at least; None if that number varies."""

    def __post_init__(self) -> None:
        normalize_counts(self, "max_lag", least=0)
        normalize_counts(self, "per_step")

    @property
    def synchronous(self) -> bool:
        """Return whether all trajectories of a step are sampled with the weights of the step before it."""
        return self.max_lag == 0 and self.per_step is not None


UNBOUNDED = Schedule()
"""The schedule without a bound on lag, whose steps have any size."""
