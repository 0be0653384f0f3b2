"""When senders are told what they are owed: credit for what was released, and how their trajectories ended.

Every message wakes four threads, so credit gathers. Who has some left is not woken for more of it, until half of the
capacity is owed; who has none, or says that it wants some, gets it as soon as there is nothing more of it to read.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

from ..._schemas.control import CreditGrant, Message, Outcomes
from .peer import Peer

__all__ = ["CreditReturner"]

COALESCE_TICKS = 8
"""Ticks that credit is held back from a sender that wants it while there are records of it to read. Where the loop has
nothing else to do they take some ten microseconds."""


class CreditReturner:
    """What is to be said to senders, by the loop in which it was made."""

    def __init__(self, send: Callable[[Peer, Message], None]) -> None:
        self._send = send
        self._pending: dict[bytes, Peer] = {}
        """Senders that are owed a message."""
        self._scheduled = False
        self._ticks_gathered = 0
        """For how many ticks some credit has been held back."""
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def __repr__(self) -> str:
        return f"<CreditReturner: owed to {len(self._pending)} senders>"

    def schedule(self, peer: Peer) -> None:
        """Answer `peer` with this tick. Safe from any thread: leases die anywhere, the socket belongs to the loop's."""
        if self._closed:
            return
        self._pending[peer.identity] = peer
        if self._scheduled:
            return
        self._scheduled = True
        with suppress(RuntimeError):  # the loop was closed under an open receiver: nobody is left to answer
            if threading.get_ident() == self._thread:
                self._loop.call_soon(self._tick)
            else:
                self._loop.call_soon_threadsafe(self._tick)

    def _tick(self) -> None:
        """Answer whom it is time to answer; while there is more to read of them, let credit gather a little."""
        self._scheduled = False
        self._ticks_gathered += 1
        waited = self._ticks_gathered >= COALESCE_TICKS
        self._give(lambda peer: waited or peer.taken == peer.sequence)
        for peer in list(self._pending.values()):
            self.schedule(peer)
        if not self._pending:
            self._ticks_gathered = 0

    def flush_all(self) -> None:
        """Answer everybody who waits for it: there is nothing more to read, or nobody reads."""
        self._give(lambda _: True)

    def _give(self, enough: Callable[[Peer], bool]) -> None:
        """Answer those that want credit if there is `enough`, others if they are owed much."""
        for peer in list(self._pending.values()):
            del self._pending[peer.identity]  # before it is looked at: what is released from now on puts it there again
            peer.collect_releases()
            if peer.credit_due or (peer.credit_requested and peer.unreturned_credit and enough(peer)):
                self.give(peer)
            elif peer.credit_requested and peer.unreturned_credit:
                self._pending[peer.identity] = peer

    def give(self, peer: Peer) -> None:
        """Tell `peer` all that it is owed, now."""
        self._pending.pop(peer.identity, None)
        if unreturned_credit := peer.take_credit():
            self._send(peer, CreditGrant(unreturned_credit))
        if peer.endings:
            endings, peer.endings = peer.endings, []
            self._send(peer, Outcomes(tuple(endings)))

    def close(self) -> None:
        """Tell nobody anything any more."""
        self._closed = True
