"""Batches that were sent and are not acknowledged, and answers that could not be delivered. No clock, no I/O."""

from __future__ import annotations

import math
import secrets
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from .records import Batch, Receipt, UnknownLease
from .scheduling import QueuedGroup

__all__ = ["IdempotencyCache", "LeaseTable", "PreparedBatch"]

G = TypeVar("G")

LEASE_BITS = 53
"""Leases are random, so that none from before a restart is valid after it; 53 bits are exact numbers in any JSON."""

REMEMBERED_S = 600.0
"""Time for which a repeated submission is recognised: longer than `submit` and the original client retry."""

MAX_REMEMBERED = 65_536
"""Receipts that are remembered; the oldest are forgotten first."""


@dataclass(slots=True)
class PreparedBatch(Generic[G]):
    """A batch that was formed and is not acknowledged."""

    number: int
    """Its place in the order of forming."""
    batch_id: str
    groups: list[QueuedGroup[G]]
    due: float = math.inf
    """Time at which its lease ends. It may still be acknowledged until it is leased again."""

    @property
    def sequences(self) -> int:
        """Return the number of sequences of all groups."""
        return sum(queued.sequences for queued in self.groups)

    def batch(self, lease: int) -> Batch[G]:
        """Return it as a trainer gets it."""
        return Batch(tuple(queued.submission for queued in self.groups), lease, self.batch_id)


class LeaseTable(Generic[G]):
    """The batches that trainers have: each under one lease, until it is acknowledged or leased again."""

    def __init__(self) -> None:
        self._leased: dict[int, PreparedBatch[G]] = {}

    def __len__(self) -> int:
        return len(self._leased)

    def lend(self, prepared: PreparedBatch[G], due: float) -> Batch[G]:
        """Return the batch under a new lease."""
        lease = secrets.randbits(LEASE_BITS)
        prepared.due = due
        self._leased[lease] = prepared
        return prepared.batch(lease)

    def acknowledge(self, lease: int) -> PreparedBatch[G]:
        """End the lease and return its batch.

        Raises:
            UnknownLease: it does not exist.
        """
        if lease not in self._leased:
            raise UnknownLease(
                f"expected the lease of an outstanding batch, got {lease}: it was acknowledged before, or was not in "
                f"time and the batch was leased again"
            )
        return self._leased.pop(lease)

    def return_batch(self, lease: int) -> None:
        """Make the batch due at once, if this lease still exists."""
        if lease in self._leased:
            self._leased[lease].due = -math.inf

    def pop_due(self, now: float) -> PreparedBatch[G] | None:
        """End the lease of the earliest batch that is due, and return that batch."""
        due = [lease for lease, prepared in self._leased.items() if prepared.due <= now]
        return self._leased.pop(min(due, key=lambda lease: self._leased[lease].number)) if due else None


class IdempotencyCache:
    """Receipts of submissions that may be repeated, each given once to the next sender of the same digest.

    The digest is of the submission's idempotency key. Of one without a key it is of the body, and only a body whose
    sender disconnected before the answer is remembered: a sender that was answered may submit equal bytes on purpose;
    one that was not has seen no submission of these bytes succeed, so the next one that is answered is the first to
    succeed. The env_id is part of the body, so no other environment gets the receipt.
    """

    def __init__(self) -> None:
        self._receipts: OrderedDict[bytes, tuple[Receipt, float]] = OrderedDict()
        """By digest, with the time at which each is forgotten, the earliest first."""

    def remember(self, now: float, digest: bytes, receipt: Receipt) -> None:
        """Keep a receipt."""
        self._receipts[digest] = receipt, now + REMEMBERED_S
        self._receipts.move_to_end(digest)
        if len(self._receipts) > MAX_REMEMBERED:
            self._receipts.popitem(last=False)

    def pop(self, now: float, digest: bytes) -> Receipt | None:
        """Return the receipt of this digest, if there is one, and forget it."""
        receipt, until = self._receipts.pop(digest, (None, 0.0))
        return receipt if now < until else None
