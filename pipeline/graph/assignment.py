"""The assignment of prompts: a source yields them in order, and its workers, or itself, sample what they are told.

The pipeline admits a prompt when it assigns it, so its ledger knows at any moment what the workers hold.
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
"""Yields the prompts of a source, each when it may begin, which it admits to the ledger of its context. Prompts that
come together are one window: they are sampled with the same weights, and shared by all who sample."""


class Assignments(Protocol):
    """The prompts that a source's worker is told to sample; the pipeline has admitted their trajectories."""

    async def next(self) -> Sequence[Assignment]:
        """Return the next prompts, waiting until the pipeline allows some; none if no more come."""
        ...
