"""The assignment of prompts: a source yields them in order, and its workers, or itself, sample those assigned.

The pipeline admits a prompt when it assigns it, so its ledger knows the prompts that workers hold at any moment.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from ..._schemas import GroupId


class Assignment(NamedTuple):
    """A prompt whose trajectories were admitted, for one of those that sample for a source."""

    group: GroupId
    mask: int
    """The repetitions to sample, as a bit mask."""


class Samplers(Protocol):
    """Those that sample the prompts of a source: its workers, or the source itself."""

    @property
    def groups_held(self) -> int:
        """Return the number of groups that are assigned, and that have not arrived."""
        ...

    async def hold_none(self) -> None:
        """Wait until every group that was assigned has arrived."""
        ...


Assign: TypeAlias = Callable[[Samplers], AsyncIterator[Sequence[Assignment]]]
"""Yields the prompts of a source, each when it may begin, and admits them to the ledger of its context. Prompts that
come together are one window: they are sampled with the same weights, and shared by all who sample."""


class Assignments(Protocol):
    """The prompts that a source's worker is assigned; the pipeline has admitted their trajectories."""

    async def next(self, room: int = 1) -> Sequence[Assignment]:
        """Return the next prompts, waiting until the pipeline allows some; empty if no more come.

        Args:
            room: prompts that can begin now; as many are asked for at once.
        """
        ...
