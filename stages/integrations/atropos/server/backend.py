"""Turn scored data into the groups of a gateway's queue, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from ....._schemas import TrajectoryGroup
from ..contract import ScoredData, Untrainable
from ..queue.records import Batch, Submission
from ..translation import from_group

G = TypeVar("G")


class Backend(Generic[G]):
    """Turns scored data into the groups of a queue and back, and is notified when groups arrive and leave.

    There are three: `RelayBackend` keeps JSON for trainers; a source keeps groups for a pipeline, a sink those of a
    pipeline for trainers. Methods that convert may block, and run in a thread.
    """

    unavailable: Mapping[str, str] = {}
    """Endpoints that this gateway does not have, by path, with the reason."""
    takes_groups: bool = True
    """True if environments send to this gateway; shared memory is then open to them."""

    @property
    def complete(self) -> bool:
        """True once the last step is done: groups are dropped from then on, and no batch is sent."""
        return False

    @property
    def step(self) -> int | None:
        """The trainer's step; None if the queue counts it."""
        return None

    @property
    def downstream(self) -> int:
        """Groups that a pipeline took and that wait in its channel."""
        return 0

    def of_scored(self, scored: ScoredData, env: str) -> G:
        """Return a group of the environment `env`.

        Raises:
            Untrainable: it is valid, and cannot be trained on.
        """
        raise NotImplementedError

    def of_group(self, group: TrajectoryGroup, env: str) -> G:
        """Return a group that arrived decoded, as `of_scored` does."""
        raise NotImplementedError

    def nbytes(self, payload: G) -> int:
        """Return its size."""
        raise NotImplementedError

    def json(self, payload: G) -> bytes:
        """Return its JSON in the form of /batch."""
        raise NotImplementedError

    def arrived(self, submissions: Sequence[Submission[G]]) -> None:
        """Note accepted groups."""

    def registered(self) -> None:
        """Note that a trainer registered: batch size and number of steps may have changed."""

    def asked(self, batch: Batch[G] | None) -> None:
        """Note a trainer's request and its answer `batch`; None without a batch."""

    def delivered(self, batch: Batch[G], *, acknowledged: bool) -> None:
        """Note that a trainer has `batch`: it acknowledged it, or asked for no lease and it was written."""


class RelayBackend(Backend[bytes]):
    """The backend of a server with environments and trainers that talk HTTP: groups stay JSON."""

    def of_scored(self, scored: ScoredData, env: str) -> bytes:  # noqa: ARG002 (see `Backend`)
        """Return the group as JSON. Only the lists that trainers stack are checked: they must be of one length."""
        lengths = [*map(len, scored.tokens)]
        if [*map(len, scored.masks)] != lengths or len(scored.scores) != len(lengths):
            raise Untrainable("lengths", "masks, scores: expected one for each of tokens, got more or fewer")
        return scored.json()

    def of_group(self, group: TrajectoryGroup, env: str) -> bytes:  # noqa: ARG002 (see `Backend`)
        """Return JSON of the contract."""
        return from_group(group)

    def nbytes(self, payload: bytes) -> int:
        """Return its length."""
        return len(payload)

    def json(self, payload: bytes) -> bytes:
        """Return the payload: it is JSON."""
        return payload
