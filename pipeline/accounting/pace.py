"""The number of trajectories that an optimizer step trains, averaged over the last few steps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

PACE_WINDOW = 8
"""Optimizer steps over which `trained_per_step` averages: long enough to be steady, short enough to follow a change."""


@dataclass(slots=True)
class Pace:
    """The number of this process' trajectories that one optimizer step trains."""

    steps: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=PACE_WINDOW))
    """The last steps, with the trajectories of each."""
    expected: float | None = None
    """The number that is known before the first step."""

    def trained(self, step: int, count: int) -> None:
        """Add trajectories that `step` has trained."""
        if self.steps and self.steps[-1][0] == step:
            count += self.steps.pop()[1]
        self.steps.append((step, count))

    @property
    def per_step(self) -> float | None:
        """Return the average; before the first step the expected number, or None."""
        if not self.steps:
            return self.expected
        span = self.steps[-1][0] - self.steps[0][0] + 1
        return sum(count for _, count in self.steps) / max(1, span)
