"""What a gateway is for: between HTTP and the queue stands a desk, which says what a group is there.

Three of them: a server in the middle keeps JSON as it came and gives it to trainers (`Relay`); a source keeps groups
for a pipeline, a sink those of a pipeline for trainers (in `gateway.py` and `trainers.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from .....schemas import TrajectoryGroup
from ..contract import ScoredData
from ..queue.records import Batch, Submission
from ..translation import from_group

__all__ = ["Desk", "Relay"]

G = TypeVar("G")


class Desk(Protocol[G]):
    """What a group is in the queue, and what is done when one comes or goes."""

    @property
    def refuses(self) -> Mapping[str, str]:
        """Endpoints that this gateway does not have, by path, and why."""
        ...

    @property
    def takes_groups(self) -> bool:
        """Whether environments send to this gateway, and may do so through shared memory."""
        ...

    @property
    def step(self) -> int | None:
        """The trainer's step, where it is known here; None where the queue count it."""
        ...

    @property
    def downstream(self) -> int:
        """Groups that were taken for a pipeline and wait in its channel."""
        ...

    def of_scored(self, scored: ScoredData, env: str) -> G:
        """A group as an environment of this name sent it. May block, and run in a thread.

        Raises:
            InvalidRecord: it cannot be trained on.
        """
        ...

    def of_group(self, group: TrajectoryGroup, env: str) -> G:
        """A group that came decoded. May block, and run in a thread."""
        ...

    def nbytes(self, payload: G) -> int:
        """What it takes."""
        ...

    def json(self, payload: G) -> bytes:
        """As `/batch` answers it. May block, and run in a thread."""
        ...

    def arrived(self, submissions: Sequence[Submission[G]]) -> None:
        """These were accepted."""
        ...

    def registered(self) -> None:
        """A trainer registered: how large batches are, and how many it still wants, may be other than before."""
        ...

    def asked(self, batch: Batch[G] | None) -> None:
        """A trainer asked for a batch, and is handed this one; None where there was none."""
        ...

    def delivered(self, batch: Batch[G]) -> None:
        """A trainer has this batch: it acknowledged it, or it was written to one that acknowledges nothing."""
        ...


class Relay:
    """The desk of a server between environments and trainers that all talk HTTP."""

    refuses: Mapping[str, str] = {}
    takes_groups = True
    step = None
    downstream = 0

    def of_scored(self, scored: ScoredData, env: str) -> bytes:  # noqa: ARG002 (see `Desk`)
        """JSON, as it came; see `Desk`."""
        return scored.json()

    def of_group(self, group: TrajectoryGroup, env: str) -> bytes:  # noqa: ARG002 (see `Desk`)
        """JSON of the contract; see `Desk`."""
        return from_group(group)

    def nbytes(self, payload: bytes) -> int:
        """Its length."""
        return len(payload)

    def json(self, payload: bytes) -> bytes:
        """Itself."""
        return payload

    def arrived(self, submissions: Sequence[Submission[bytes]]) -> None:
        """Trainers ask by themselves."""

    def registered(self) -> None:
        """The queue know."""

    def asked(self, batch: Batch[bytes] | None) -> None:
        """They ask again."""

    def delivered(self, batch: Batch[bytes]) -> None:
        """Nobody counts here."""
