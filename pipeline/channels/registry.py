"""The requirements of an acceptor on the receiver that it accepts senders for."""

from __future__ import annotations

from typing import Protocol

from ..._schemas.control import Message, Reject
from .admission import Admission, RejectionCounter
from .peer import Peer

__all__ = ["Registry"]


class Registry(Protocol):
    """Holds the admitted senders, and handles their messages and their disconnection."""

    admission: Admission[Peer]
    rejections: RejectionCounter
    peers: dict[bytes, Peer]

    def drain(self) -> None:
        """Handle all messages that have arrived."""
        ...

    def send(self, identity: bytes, message: Message) -> None:
        """Send to a ZeroMQ connection, if there still is one."""
        ...

    def disconnect_for_error(self, peer: Peer, error: Exception) -> None:
        """Disconnect a peer that violated the protocol."""
        ...

    def reaches(self, peer: Peer) -> bool:
        """Return whether ZeroMQ has a connection to `peer`."""
        ...

    def on_disconnect(self, peer: Peer) -> Reject | None:
        """Handle the end of a peer's connection; return the message for the peer where it was unresponsive."""
        ...
