"""The admission of senders by a receiver. All transports share these decisions."""

from __future__ import annotations

from collections.abc import Collection

from ..._schemas import TokenizerIdentity
from ..._schemas.control import PROTOCOL_VERSION, Connect, Reject
from ..._schemas.tokenizer import disagreements


class Admission:
    """Decides whether a sender may join, and counts those that did.

    A connection counts as a sender as soon as it is granted a place. Until then it takes no place.
    """

    def __init__(
        self,
        peers: Collection[bytes],
        *,
        transport: str,
        kind: str,
        max_senders: int,
        tokenizer: TokenizerIdentity | None,
    ) -> None:
        self.granted = 0
        """Senders that were granted a place and have not joined yet."""
        self.joined: int = 0
        """Senders that have ever joined."""
        self.max_senders = max_senders
        """Senders that may be connected at a time."""
        self._peers = peers
        """The identities of the connected senders."""
        self._transport = transport
        self._kind = kind
        self._tokenizer = tokenizer

    def __repr__(self) -> str:
        return f"<Admission of {self._kind}s over {self._transport}: {self.joined} joined, {self.granted} granted>"

    def rejection(self, request: Connect) -> Reject | None:
        """Return the reason why a sender is rejected; None where it may join."""
        if request.version != PROTOCOL_VERSION:
            versions = f"expected protocol version {PROTOCOL_VERSION}, got {request.version}"
            return Reject("ProtocolMismatch", f"{versions}: install the same penstock on both sides")
        if (request.transport, request.kind) != (self._transport, self._kind):
            expected = f"{self._kind} over {self._transport}"
            return Reject("ProtocolMismatch", f"expected {expected}, got {request.kind} over {request.transport}")
        if len(self._peers) + self.granted >= self.max_senders:
            return Reject("TooManySenders", f"expected at most {self.max_senders} senders: raise max_senders")
        if request.identity in self._peers:
            return Reject("PeerClosed", "the identity is in use")
        parts = [("the receiver", self._tokenizer), (request.name, request.tokenizer)]
        known = [(name, tokenizer) for name, tokenizer in parts if tokenizer is not None]
        differing = "".join(disagreements(known))
        return Reject("TokenizersDiffer", differing) if differing else None
