"""Which senders a receiver lets in, and what becomes of the others: a counted refusal.

The decisions that all transports share. What was refused is told, but not so often that telling it becomes the harm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from ..._schemas import TokenizerIdentity
from ..._schemas.control import PROTOCOL_VERSION, Connect, Reject, printable
from ..._schemas.tokenizer import disagreements
from ..telemetry import get_logger
from .connection import PeerControl
from .transport import PayloadReader

__all__ = ["Admission", "RejectionCounter"]

log = get_logger("penstock.channel")

G = TypeVar("G")


class RejectionCounter:
    """Counts what was refused, and tells of the first few, then of every second as many."""

    TOLD = 8

    def __init__(self, url: str) -> None:
        self.count = 0
        self._url = url

    def note(self, reason: str) -> None:
        """Something was refused."""
        self.count += 1
        if self.count <= self.TOLD or not self.count & (self.count - 1):
            told = printable(reason).replace("\n", "\\n")
            log.warning("peer_rejected", url=self._url, reason=told, rejected=self.count)


class Admission(Generic[G]):
    """Decides who may send, and counts.

    A connection counts as a sender from `grant` on, when it has proved that it may be one. Until then it holds no
    place, however many there are.
    """

    def __init__(
        self,
        peers: Collection[bytes],
        admit: Callable[[Connect, PeerControl, PayloadReader], G],
        check: Callable[[Connect], None],
        *,
        transport: str,
        kind: str,
        most: int,
        tokenizer: TokenizerIdentity | None,
    ) -> None:
        self.granted = 0
        """Senders that were granted a place and are not in yet."""
        self.joined = 0
        """Senders that ever came in."""
        self.most = most
        """Senders that may be in at a time."""
        self._peers = peers
        """The identities of those who are in."""
        self.check = check
        """Raises where a sender may not join; asked before it is granted a place, and before it is let in."""
        self._admit = admit
        self._transport = transport
        self._kind = kind
        self._tokenizer = tokenizer

    def __repr__(self) -> str:
        return f"<Admission of {self._kind}s over {self._transport}: {self.joined} let in, {self.granted} granted>"

    def refusal(self, hello: Connect) -> Reject | None:
        """Return why a sender is not let in; None where it may be."""
        if hello.version != PROTOCOL_VERSION:
            versions = f"expected protocol version {PROTOCOL_VERSION}, got {hello.version}"
            return Reject("ProtocolMismatch", f"{versions}: install the same penstock on both sides")
        if (hello.transport, hello.kind) != (self._transport, self._kind):
            expected = f"{self._kind} over {self._transport}"
            return Reject("ProtocolMismatch", f"expected {expected}, got {hello.kind} over {hello.transport}")
        if len(self._peers) + self.granted >= self.most:
            return Reject("TooManySenders", f"expected at most {self.most} senders: raise max_senders")
        if hello.identity in self._peers:
            return Reject("PeerClosed", "the identity is taken")
        parts = [("the receiver", self._tokenizer), (hello.name, hello.tokenizer)]
        known = [(name, tokenizer) for name, tokenizer in parts if tokenizer is not None]
        differing = "".join(disagreements(known))
        return Reject("TokenizersDiffer", differing) if differing else None

    def admit(self, hello: Connect, control: PeerControl, reader: PayloadReader) -> G:
        """Let a sender in that was granted a place.

        Raises:
            PenstockError: what `check` raises: somebody else came under its name meanwhile.
        """
        self.check(hello)
        self.joined += 1
        return self._admit(hello, control, reader)
