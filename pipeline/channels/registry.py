"""What an acceptor needs of the receiver that it lets senders in for."""

from __future__ import annotations

from typing import Protocol

from ..._schemas.control import Message, Reject
from .admission import Admission, RejectionCounter
from .peer import Peer

__all__ = ["Registry"]


class Registry(Protocol):
    """Holds the senders that are in, and takes note of their messages and their end."""

    admission: Admission[Peer]
    refusals: RejectionCounter
    peers: dict[bytes, Peer]

    def drain(self) -> None:
        """Hear all that has come."""
        ...

    def send(self, identity: bytes, message: Message) -> None:
        """Send to a ZeroMQ connection, where there is one."""
        ...

    def expel(self, peer: Peer, error: Exception) -> None:
        """Cut off a peer that broke the protocol."""
        ...

    def reaches(self, peer: Peer) -> bool:
        """Whether ZeroMQ has a connection to `peer`."""
        ...

    def gone(self, peer: Peer) -> Reject | None:
        """Take note that the connection of `peer` has ended; return what it is told where it was silent."""
        ...
