"""How a sender is let in: what it says at a receiver's door, and what may become of that."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import anyio

from ...schemas import ProtocolMismatch, TokenizerIdentity
from ...schemas.control import PROTOCOL_VERSION, Hello, Message, Offer, Ready, Refused, Welcome, printable
from ..errors import (
    MemberNameInUse,
    MemberNameRequired,
    NobodyListens,
    OutOfSharedMemory,
    PeerClosed,
    PenstockError,
    TokenizersDiffer,
    TooManyMembers,
    TooManySenders,
)
from .door import Door

__all__ = ["answering_within", "introduce", "let_in"]

REFUSALS: dict[str, type[PenstockError]] = {
    error.__name__: error
    for error in (
        MemberNameInUse,
        MemberNameRequired,
        OutOfSharedMemory,
        PeerClosed,
        ProtocolMismatch,
        TokenizersDiffer,
        TooManyMembers,
        TooManySenders,
    )
}
"""What a refusal at the door raises at the sender, by the name that travels."""


@contextmanager
def answering_within(silence_s: float | None, url: str) -> Iterator[None]:
    """Introductions in the body end in time.

    Raises:
        NobodyListens: the receiver was silent for `silence_s`.
    """
    try:
        with anyio.fail_after(silence_s):
            yield
    except TimeoutError:
        raise NobodyListens(
            f"expected the receiver at {url} to answer, got silence for {silence_s} s: is its process stopped, or its "
            f"event loop held up? Raise silence_s where that is usual"
        ) from None


async def introduce(
    door: Door, carrier: str, kind: str, name: str, tokenizer: TokenizerIdentity | None
) -> tuple[Welcome, bytes]:
    """Ask to be let in; returns what was granted, and the identity to use.

    Raises:
        ProtocolMismatch: the receiver carries something else, or speaks another version.
        TokenizersDiffer: it has another tokenizer.
        TooManySenders: its budget of memory is given out.
        MemberNameRequired, MemberNameInUse, TooManyMembers: it counts senders by name, and not this one.
        PeerClosed: it refused for another reason, or went away.
    """
    identity = b"p" + secrets.token_bytes(15)
    answer = await _answer(door, Hello(PROTOCOL_VERSION, carrier, kind, identity, name, os.getpid(), tokenizer))
    if not isinstance(answer, Welcome) or answer.version != PROTOCOL_VERSION:
        raise ProtocolMismatch(f"expected a Welcome of protocol version {PROTOCOL_VERSION}, got {answer}")
    return answer, identity


async def let_in(door: Door, offer: Offer | None = None, fd: int | None = None) -> None:
    """Hand over the segment `offer` with its `fd`, where the carrier has one, and wait for the last word.

    Raises:
        OutOfSharedMemory: the receiver cannot map this sender's segment.
        PeerClosed: it refused for another reason, or went away.
    """
    answer = await _answer(door, offer, fd)
    if not isinstance(answer, Ready):
        raise ProtocolMismatch(f"expected Ready, got {type(answer).__name__}")


async def _answer(door: Door, said: Message | None = None, fd: int | None = None) -> Message:
    """What the receiver says to what was `said`; it may have answered, and gone, before it heard that."""
    if said is not None:
        with suppress(anyio.BrokenResourceError):
            await door.say(said, fd)
    try:
        answer = await door.hear()
    except anyio.EndOfStream:
        raise PeerClosed("the receiver closed the door without an answer") from None
    if isinstance(answer, Refused):
        raise REFUSALS.get(answer.error, PeerClosed)(f"the receiver refused: {printable(answer.reason)}")
    return answer
