"""Leases: batches that are out until they are acknowledged, and come back when they are not."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from .errors import UnknownLease

__all__ = ["Leases"]


class Numbered(Protocol):
    """A batch, as far as leases know it."""

    @property
    def number(self) -> int:
        """Its place in the order in which batches were formed."""
        ...


T = TypeVar("T", bound=Numbered)

LEASE_BITS = 53
"""Leases are random, so that none of a gateway that was restarted is one of the new; and numbers in any JSON."""


@dataclass(slots=True)
class _Lease(Generic[T]):
    batch: T
    until: float
    """When it comes back; what has come back is to be handed out again, and may still be acknowledged until then."""


class Leases(Generic[T]):
    """Batches that are out, or have come back."""

    def __init__(self) -> None:
        self._out: dict[int, _Lease[T]] = {}
        self._back: dict[int, _Lease[T]] = {}
        self._first_due = math.inf

    def lend(self, batch: T, until: float) -> int:
        """This batch is out; returns its lease."""
        lease = secrets.randbits(LEASE_BITS)
        self._out[lease] = _Lease(batch, until)
        self._first_due = min(self._first_due, until)
        return lease

    def end(self, lease: int) -> T:
        """The batch has arrived.

        Raises:
            UnknownLease: it is neither out nor back.
        """
        for leases in (self._out, self._back):
            if lease in leases:
                return leases.pop(lease).batch
        raise UnknownLease(
            f"expected the lease of a batch that is out, got {lease}: it was acknowledged before, or was not in time "
            f"and the batch went out again"
        )

    def give_back(self, lease: int) -> None:
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

    def again(self) -> T | None:
        """The earliest batch that came back; it is nobody's now."""
        if not self._back:
            return None
        lease = min(self._back, key=lambda lease: self._back[lease].batch.number)
        return self._back.pop(lease).batch
