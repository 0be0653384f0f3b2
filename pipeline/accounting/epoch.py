"""`Epoch`: one pass of a source over its prompts, with some rejected."""

from __future__ import annotations

from collections.abc import Collection
from typing import Self

import msgspec

from ..._schemas.bounds import Count


class Epoch(msgspec.Struct, frozen=True, array_like=True):
    """One pass over the prompts of a source, once a prompt was rejected."""

    trajectories: Count = 0
    """Those of all prompts; 0 if no prompt was rejected, or their number is unknown."""
    none_fits: bool = False
    """True if every prompt was looked at, and each is rejected."""

    @classmethod
    def of_all(cls, epochs: Collection[Self]) -> Self:
        """Return the joint view of all workers of a source: each of them looks at the whole epoch."""
        trajectories = min((epoch.trajectories for epoch in epochs if epoch.trajectories), default=0)
        return cls(trajectories, none_fits=any(epoch.none_fits for epoch in epochs))


UNKNOWN = Epoch()
