"""The bundles and ends of senders that have arrived at a receiver. Knows no socket and no listener."""

from __future__ import annotations

from collections import deque
from typing import Literal, TypeAlias

from ..errors import PeerLost, StaleDescriptor
from .peer import Peer
from .transport import Bundle

Notice: TypeAlias = PeerLost | Literal["closed", "disconnected"]
"""The end of a sender: it died, or closed; or it had closed, and now its connection has ended."""

Event: TypeAlias = tuple[Peer, Bundle | Notice]


class ArrivalQueue:
    """Bundles and ends of senders, in order of arrival, that `receive` has not finished."""

    __slots__ = ("events", "index", "queued")

    def __init__(self) -> None:
        self.events: deque[Event] = deque()
        """A bundle stays the first one until all of its records are taken."""
        self.index: int = 0
        """Records of the first bundle that were taken already."""
        self.queued: int = 0
        """Records that arrived and were not taken yet."""

    def add(self, peer: Peer, bundle: Bundle) -> None:
        """Add a bundle.

        Raises:
            StaleDescriptor: it does not hold the next records of `peer`.
        """
        descriptor = bundle[0]
        if descriptor.records < 1 or descriptor.sequence != peer.sequence + descriptor.records:
            raise StaleDescriptor(f"expected record {peer.sequence + 1} of {peer.name}, got {descriptor}")
        peer.sequence = descriptor.sequence
        peer.nbytes += descriptor.bytes_of(descriptor.records)
        self.queued += descriptor.records
        self.events.append((peer, bundle))

    def advance(self, peer: Peer, bundle: Bundle, records: int) -> None:
        """Advance past some records of the first bundle, which is `bundle` of `peer`."""
        peer.taken += records
        self.queued -= records
        self.index += records
        if self.index == bundle[0].records:
            self.events.popleft()
            self.index = 0
