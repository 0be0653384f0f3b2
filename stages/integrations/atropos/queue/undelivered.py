"""Undelivered: what was accepted and could not be answered, and so will be submitted again."""

from __future__ import annotations

from collections import OrderedDict

from .records import Receipt

__all__ = ["Undelivered"]

AWAITED_S = 300.0
"""How long a repetition is waited for: the original client makes three attempts within it, each with its timeout."""

AWAITED = 4_096
"""How many are waited for; those that have been for longest are forgotten first."""


class Undelivered:
    """Receipts that nobody got, each to be given once to whoever submits the same bytes.

    Only a body whose sender was gone before the answer is among them. A sender that was answered may submit equal
    bytes, and means it; one that was not knows of no submission of these bytes that succeeded, so the one that is
    answered with the receipt is the first to succeed. The id of the environment is part of the body, so that no other
    is answered for it.
    """

    def __init__(self) -> None:
        self._receipts: OrderedDict[bytes, tuple[Receipt, float]] = OrderedDict()
        """With when they are forgotten, the earliest first."""

    def note(self, now: float, digest: bytes, receipt: Receipt) -> None:
        """Nobody got this receipt."""
        self._receipts[digest] = receipt, now + AWAITED_S
        self._receipts.move_to_end(digest)
        while len(self._receipts) > AWAITED:
            self._receipts.popitem(last=False)

    def receipt(self, now: float, digest: bytes) -> Receipt | None:
        """What the sender of this body did not get, if it was accepted before."""
        while self._receipts and next(iter(self._receipts.values()))[1] <= now:
            self._receipts.popitem(last=False)
        receipt, _ = self._receipts.pop(digest, (None, 0.0))
        return receipt
