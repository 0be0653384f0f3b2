"""A node of a chain: a stage, its placement, and the edge that leads to it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..._schemas.errors import InvalidConfig
from ..._schemas.numbers import normalize_counts, whole_number
from ..channels.channel import MEMORY_CAPACITY, REMOTE_CAPACITY, REMOTE_CAPACITY_BYTES
from .placement import Here, Placement


@dataclass(frozen=True, slots=True)
class StageNode:
    """A stage and the edge that leads to it."""

    stage: Any
    """A Source in the first node, a Sink in the last one of a pipeline, a Stage in between."""
    name: str
    on: Placement
    capacity: int | None = None
    """Records in the edge that leads to this stage; None for the default, and in the first node."""
    capacity_bytes: int | None = None
    max_lag: int | None = None
    """In the first node, the bound on lag; None for no bound, or for that of the pipeline around a fragment."""

    def __post_init__(self) -> None:
        """Convert the capacities that are whole numbers; `check()` refuses the others by name.

        Raises:
            InvalidConfig: `max_lag` is no whole number, or negative.
        """
        normalize_counts(self, "max_lag", least=0)
        for name in ("capacity", "capacity_bytes"):
            if (value := getattr(self, name)) is not None:
                with suppress(InvalidConfig):
                    object.__setattr__(self, name, whole_number(name, value))

    @property
    def memory_capacity(self) -> int:
        """Return the records that may wait in front of this stage, within a process."""
        return self.capacity or MEMORY_CAPACITY

    @property
    def remote_capacity(self) -> int:
        """Return the records that may wait in front of this stage, of each sender of another process."""
        return self.capacity or REMOTE_CAPACITY

    @property
    def remote_capacity_bytes(self) -> int:
        """Return the bytes of those."""
        return self.capacity_bytes or REMOTE_CAPACITY_BYTES

    @property
    def remote(self) -> bool:
        """Return whether the stage runs in workers: processes, or actors of Ray."""
        return not isinstance(self.on, Here)
