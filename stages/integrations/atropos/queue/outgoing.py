"""Outgoing: batches that were formed. They are ready, out until they are acknowledged, or came back.

A batch leaves for good when its lease is ended, in time or later, or when it is handed out without one.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import Generic, TypeVar

from .group_queue import Queued
from .records import Batch, UnknownLease

__all__ = ["Formed", "Outgoing"]

G = TypeVar("G")

LEASE_BITS = 53
"""Leases are random, so that none of a gateway that was restarted is one of the new; and numbers in any JSON."""


@dataclass(frozen=True, slots=True)
class Formed(Generic[G]):
    """A batch that was formed."""

    number: int
    """In the order in which they were formed."""
    batch_id: str
    """What it is called."""
    groups: list[Queued[G]]
    """Its groups."""

    @property
    def sequences(self) -> int:
        """Of all its groups."""
        return sum(queued.size for queued in self.groups)

    def batch(self, lease: int | None) -> Batch[G]:
        """As it is handed out."""
        return Batch(tuple(queued.submission for queued in self.groups), lease, self.batch_id)


@dataclass(slots=True)
class _Lease(Generic[G]):
    formed: Formed[G]
    until: float
    """When it comes back. It may still be acknowledged, until it is handed out again."""


class Outgoing(Generic[G]):
    """Batches from the time they are formed until they are somebody's for good."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        """Part of what its batches are called."""
        self._ready: list[Formed[G]] = []
        """The newest is the last."""
        self._out: dict[int, _Lease[G]] = {}
        self._back: dict[int, _Lease[G]] = {}
        self._first_due = math.inf
        self._formed = 0
        """How many ever were."""

    def __len__(self) -> int:
        return len(self._ready) + len(self._out) + len(self._back)

    def form(self, groups: list[Queued[G]]) -> None:
        """These are a batch."""
        self._formed += 1
        self._ready.append(Formed(self._formed, f"{self._incarnation}.{self._formed}", groups))

    def newest(self) -> Formed[G] | None:
        """The batch that was formed last, of those that nobody had; it is nobody's now."""
        return self._ready.pop() if self._ready else None

    def again(self) -> Formed[G] | None:
        """The earliest batch that came back; it is nobody's now."""
        if not self._back:
            return None
        lease = min(self._back, key=lambda lease: self._back[lease].formed.number)
        return self._back.pop(lease).formed

    def lend(self, formed: Formed[G], until: float) -> int:
        """This batch is out; returns its lease."""
        lease = secrets.randbits(LEASE_BITS)
        self._out[lease] = _Lease(formed, until)
        self._first_due = min(self._first_due, until)
        return lease

    def end(self, lease: int) -> Formed[G]:
        """The batch has arrived.

        Raises:
            UnknownLease: it is neither out nor back.
        """
        for leases in (self._out, self._back):
            if lease in leases:
                return leases.pop(lease).formed
        raise UnknownLease(
            f"expected the lease of a batch that is out, got {lease}: it was acknowledged before, or was not in time "
            f"and the batch went out again"
        )

    def return_batch(self, lease: int) -> None:
        """The batch comes back at once, if it is still out."""
        if lease in self._out:
            self._back[lease] = self._out.pop(lease)

    def expire(self, now: float) -> None:
        """Batches whose time is over come back."""
        if now < self._first_due:
            return
        for lease in [lease for lease, lent in self._out.items() if lent.until <= now]:
            self._back[lease] = self._out.pop(lease)
        self._first_due = min((lent.until for lent in self._out.values()), default=math.inf)
