"""Which senders a receiver lets in, and what becomes of the others: a counted refusal.

The decisions that all transports share. What was refused is told, but not so often that telling it becomes the harm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from ...schemas import TokenizerIdentity
from ...schemas.control import PROTOCOL_VERSION, Hello, Refused, printable
from ...schemas.tokenizer import disagreements
from ..telemetry import get_logger
from .carrier import Inlet
from .connection import PeerControl

__all__ = ["Admission", "Refusals"]

log = get_logger("penstock.channel")

G = TypeVar("G")


class Refusals:
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
        guests: Collection[bytes],
        admit: Callable[[Hello, PeerControl, Inlet], G],
        check: Callable[[Hello], None],
        *,
        carrier: str,
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
        self._guests = guests
        """The identities of those who are in."""
        self.check = check
        """Raises where a sender may not join; asked before it is granted a place, and before it is let in."""
        self._admit = admit
        self._carrier = carrier
        self._kind = kind
        self._tokenizer = tokenizer

    def __repr__(self) -> str:
        return f"<Admission of {self._kind}s over {self._carrier}: {self.joined} let in, {self.granted} granted>"

    def refusal(self, hello: Hello) -> Refused | None:
        """Return why a sender is not let in; None where it may be."""
        if hello.version != PROTOCOL_VERSION:
            versions = f"expected protocol version {PROTOCOL_VERSION}, got {hello.version}"
            return Refused("ProtocolMismatch", f"{versions}: install the same penstock on both sides")
        if (hello.carrier, hello.kind) != (self._carrier, self._kind):
            expected = f"{self._kind} over {self._carrier}"
            return Refused("ProtocolMismatch", f"expected {expected}, got {hello.kind} over {hello.carrier}")
        if len(self._guests) + self.granted >= self.most:
            return Refused("TooManySenders", f"expected at most {self.most} senders: raise max_senders")
        if hello.identity in self._guests:
            return Refused("PeerClosed", "the identity is taken")
        parts = [("the receiver", self._tokenizer), (hello.name, hello.tokenizer)]
        known = [(name, tokenizer) for name, tokenizer in parts if tokenizer is not None]
        differing = "".join(disagreements(known))
        return Refused("TokenizersDiffer", differing) if differing else None

    def admit(self, hello: Hello, control: PeerControl, inlet: Inlet) -> G:
        """Let a sender in that was granted a place.

        Raises:
            PenstockError: what `check` raises: somebody else came under its name meanwhile.
        """
        self.check(hello)
        self.joined += 1
        return self._admit(hello, control, inlet)
