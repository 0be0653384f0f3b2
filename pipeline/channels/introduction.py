"""The handshake of a sender: what it says to a receiver, and what may become of that."""

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
    OutOfFileDescriptors,
    OutOfSharedMemory,
    PeerClosed,
    PenstockError,
    TokenizersDiffer,
    TooManyMembers,
    TooManySenders,
)
from .connection import Conversation

__all__ = ["answering_within", "greeting", "introduce", "let_in"]

REFUSALS: dict[str, type[PenstockError]] = {
    error.__name__: error
    for error in (
        MemberNameInUse,
        MemberNameRequired,
        OutOfFileDescriptors,
        OutOfSharedMemory,
        PeerClosed,
        ProtocolMismatch,
        TokenizersDiffer,
        TooManyMembers,
        TooManySenders,
    )
}
"""What a refusal raises at the sender, by the name that travels."""


HELD_UP = "is its process stopped, or its event loop held up? Raise silence_s where that is usual"


@contextmanager
def answering_within(silence_s: float | None, url: str, cause: str = HELD_UP) -> Iterator[None]:
    """Introductions in the body end in time.

    Raises:
        NobodyListens: the receiver was silent for `silence_s`; `cause` asks what may be wrong there.
    """
    try:
        with anyio.fail_after(silence_s):
            yield
    except TimeoutError:
        raise NobodyListens(
            f"expected the receiver at {url} to answer, got silence for {silence_s} s: {cause}"
        ) from None


def greeting(carrier: str, kind: str, name: str, tokenizer: TokenizerIdentity | None) -> Hello:
    """Return what a sender says first, under an identity of its own."""
    return Hello(PROTOCOL_VERSION, carrier, kind, b"p" + secrets.token_bytes(15), name, os.getpid(), tokenizer)


async def introduce(connection: Conversation, hello: Hello) -> Welcome:
    """Ask to be let in; returns what was granted.

    Raises:
        ProtocolMismatch: the receiver carries something else, or speaks another version.
        TokenizersDiffer: it has another tokenizer.
        TooManySenders: its budget of memory is given out.
        MemberNameRequired, MemberNameInUse, TooManyMembers: it counts senders by name, and not this one.
        PeerClosed: it refused for another reason, or went away.
    """
    answer = await _answer(connection, hello)
    if not isinstance(answer, Welcome) or answer.version != PROTOCOL_VERSION:
        raise ProtocolMismatch(f"expected a Welcome of protocol version {PROTOCOL_VERSION}, got {answer}")
    return answer


async def let_in(connection: Conversation, offer: Offer | Ready, fd: int | None = None) -> None:
    """Answer what was granted, with the segment `offer` and its `fd` where the carrier has one; wait for the last word.

    Raises:
        OutOfSharedMemory: the receiver cannot map this sender's segment.
        OutOfFileDescriptors: the receiver has none left for it.
        PeerClosed: it refused for another reason, or went away.
    """
    answer = await _answer(connection, offer, fd)
    if not isinstance(answer, Ready):
        raise ProtocolMismatch(f"expected Ready, got {type(answer).__name__}")


async def _answer(connection: Conversation, said: Message, fd: int | None = None) -> Message:
    """What the receiver says to what was `said`; it may have answered, and gone, before it heard that."""
    with suppress(anyio.BrokenResourceError):
        await connection.say(said, fd)
    try:
        answer = await connection.hear()
    except anyio.EndOfStream:
        raise PeerClosed("the receiver closed the connection without an answer") from None
    if isinstance(answer, Refused):
        raise REFUSALS.get(answer.error, PeerClosed)(f"the receiver refused: {printable(answer.reason)}")
    return answer
