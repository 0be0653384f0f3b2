"""The return of credit to senders, with the outcomes of their trajectories.

Every message wakes four threads, so credit is returned in batches. A sender that still has some gets more when half of
the capacity is unreturned; a sender without any, or with a request, gets it as soon as no more of its records wait to
be read.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

from ..._schemas.bounds import MOST_ENTRIES, batched
from ..._schemas.control import CreditGrant, Message, Outcomes
from .peer import Peer

COALESCE_TICKS = 8
"""Ticks that requested credit is withheld while there are records of the sender to read. In an idle loop they take some
ten microseconds."""


class CreditReturner:
    """Decides when to return credit and outcomes to senders; runs in the event loop that it was made in."""

    def __init__(self, send: Callable[[bytes, Message], object]) -> None:
        self._send = send
        self._pending: dict[bytes, Peer] = {}
        """Senders whose credit or outcomes may be due."""
        self._scheduled = False
        self._ticks_held = 0
        """Ticks in a row with some credit withheld."""
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def __repr__(self) -> str:
        return f"<CreditReturner: {len(self._pending)} senders pending>"

    def schedule(self, peer: Peer) -> None:
        """Return credit to `peer` in the next tick. Safe from any thread: a lease may die in any of them."""
        if self._closed:
            return
        self._pending[peer.identity] = peer
        if self._scheduled:
            return
        self._scheduled = True
        with suppress(RuntimeError):  # the loop was closed under an open receiver
            if threading.get_ident() == self._thread:
                self._loop.call_soon(self._tick)
            else:
                self._loop.call_soon_threadsafe(self._tick)

    def _tick(self) -> None:
        """Return the credit that is due; while more records of a sender wait to be read, let its credit accumulate."""
        self._scheduled = False
        self._ticks_held += 1
        waited = self._ticks_held >= COALESCE_TICKS
        self._return_credit_where(lambda peer: waited or peer.taken == peer.sequence)
        for peer in list(self._pending.values()):
            self.schedule(peer)
        if not self._pending:
            self._ticks_held = 0

    def flush_all(self) -> None:
        """Return all requested credit: no record waits to be read, or the receiver does not read."""
        self._return_credit_where(lambda _: True)

    def _return_credit_where(self, ready: Callable[[Peer], bool]) -> None:
        """Return credit to the peers that request it and are `ready`, and to those with much of it unreturned."""
        for peer in list(self._pending.values()):
            del self._pending[peer.identity]  # first, because a release from now on adds it again
            peer.collect_releases()
            if peer.credit_due or (peer.credit_requested and peer.unreturned_credit and ready(peer)):
                self.return_credit(peer)
            elif peer.credit_requested and peer.unreturned_credit:
                self._pending[peer.identity] = peer

    def return_credit(self, peer: Peer) -> None:
        """Send `peer` all its unreturned credit and its outcomes, now."""
        self._pending.pop(peer.identity, None)
        for spans in batched(peer.take_credit(), MOST_ENTRIES):
            self._send(peer.identity, CreditGrant(spans))
        endings, peer.endings = peer.endings, []
        for entries in batched(endings, MOST_ENTRIES):
            self._send(peer.identity, Outcomes(entries))

    def close(self) -> None:
        """Stop sending."""
        self._closed = True
