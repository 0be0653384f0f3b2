"""The configuration of a receiver, and its listener."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ..._schemas import TokenizerIdentity
from ..errors import PeerLost
from .keys import ChannelKey
from .members import Members
from .peer import Peer


class PeerListener(Protocol):
    """Receives the events of senders in their order; implemented by pipelines."""

    def received(self, peer: Peer, record: Any) -> Any:
        """Handle `record`, and return the result for `receive`; None for no record."""
        ...

    def observed(self, peer: Peer, payload: bytes) -> None:
        """Handle the observations of the sender's process."""
        ...

    def lost(self, peer: Peer, error: PeerLost) -> None:
        """Handle the death of the sender; all that it had published was received before."""
        ...

    def closed(self, peer: Peer) -> None:
        """Handle the close of the sender; all that it had sent was received before."""
        ...

    def disconnected(self, peer: Peer) -> None:
        """Handle the end of the connection of a sender that had closed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverConfig:
    """The configuration of a receiver; see `serve`."""

    capacity: int
    capacity_bytes: int
    members: Members | None
    """Counts senders by name; None if they need no name."""
    max_senders: int
    listener: PeerListener | None
    name: str
    key: ChannelKey | None
    heartbeat_timeout_s: float | None
    tokenizer: TokenizerIdentity | None
    checksum: bool
