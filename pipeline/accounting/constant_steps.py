"""`ConstantSteps`: the steps of a run without any gradient from rewards."""

from __future__ import annotations

from typing import NamedTuple

STEPS_IN_A_ROW = 3
"""Steps without a gradient at which a run warns, or ends without success: one or two may be chance."""


class ConstantSteps(NamedTuple):
    """All steps that a run has done, each without a gradient from rewards."""

    steps: int
    constant: str
    """The part that was the same in the last one: `rewards: each is 0`."""

    def __str__(self) -> str:
        """Return a sentence about them."""
        return f"no gradient from rewards in {self.steps} step{'s' if self.steps > 1 else ''}: {self.constant}"
