"""The handshake of a sender: what it says to a receiver, and what may become of that."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import anyio

from ..._schemas import ProtocolMismatch, TokenizerIdentity
from ..._schemas.control import PROTOCOL_VERSION, Accept, Connect, Message, Ready, Reject, SegmentOffer, printable
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

__all__ = ["greeting", "handshake_timeout", "offer_segment", "request_session"]

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


HELD_UP = "is its process stopped, or its event loop held up? Raise heartbeat_timeout_s where that is usual"


@contextmanager
def handshake_timeout(heartbeat_timeout_s: float | None, url: str, cause: str = HELD_UP) -> Iterator[None]:
    """Introductions in the body end in time.

    Raises:
        NobodyListens: the receiver was silent for `heartbeat_timeout_s`; `cause` asks what may be wrong there.
    """
    try:
        with anyio.fail_after(heartbeat_timeout_s):
            yield
    except TimeoutError:
        raise NobodyListens(
            f"expected the receiver at {url} to answer, got silence for {heartbeat_timeout_s} s: {cause}"
        ) from None


def greeting(transport: str, kind: str, name: str, tokenizer: TokenizerIdentity | None) -> Connect:
    """Return what a sender says first, under an identity of its own."""
    return Connect(PROTOCOL_VERSION, transport, kind, b"p" + secrets.token_bytes(15), name, os.getpid(), tokenizer)


async def request_session(connection: Conversation, hello: Connect) -> Accept:
    """Ask to be let in; returns what was granted.

    Raises:
        ProtocolMismatch: the receiver carries something else, or speaks another version.
        TokenizersDiffer: it has another tokenizer.
        TooManySenders: its budget of memory is given out.
        MemberNameRequired, MemberNameInUse, TooManyMembers: it counts senders by name, and not this one.
        PeerClosed: it refused for another reason, or went away.
    """
    answer = await _answer(connection, hello)
    if not isinstance(answer, Accept) or answer.version != PROTOCOL_VERSION:
        raise ProtocolMismatch(f"expected an Accept of protocol version {PROTOCOL_VERSION}, got {answer}")
    return answer


async def offer_segment(connection: Conversation, offer: SegmentOffer | Ready, fd: int | None = None) -> None:
    """Answer an `Accept` with the segment `offer` and its `fd`, or with `Ready` over tcp; wait for the answer.

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
        await connection.send(said, fd)
    try:
        answer = await connection.receive()
    except anyio.EndOfStream:
        raise PeerClosed("the receiver closed the connection without an answer") from None
    if isinstance(answer, Reject):
        raise REFUSALS.get(answer.error, PeerClosed)(f"the receiver refused: {printable(answer.reason)}")
    return answer
