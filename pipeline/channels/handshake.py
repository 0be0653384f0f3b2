"""The sender's side of the handshake: its messages, the receiver's answers, and the errors that a rejection raises."""

from __future__ import annotations

import os
import secrets
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress

import anyio

from ..._schemas import ProtocolMismatch, TokenizerIdentity
from ..._schemas.control import PROTOCOL_VERSION, Accept, Connect, Message, Ready, Reject, printable
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
from .members import DEFAULT_ABSENCE_TIMEOUT_S

REJECTIONS: dict[str, type[PenstockError]] = {
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
"""The error that a rejection raises at the sender, by the name that `Reject` carries."""


ANSWER_TIMEOUT_S = DEFAULT_ABSENCE_TIMEOUT_S
"""Bound on the attempts to connect to a receiver whose ZeroMQ answers and whose event loop does not: it would wait as
long for a sender."""

EVENT_LOOP_BLOCKED = "is its process stopped, or its event loop blocked? Raise heartbeat_timeout_s where that is usual"
NOT_SERVED = "its ZeroMQ answers, so its event loop is blocked"


@contextmanager
def handshake_timeout(heartbeat_timeout_s: float | None, url: str, cause: str = EVENT_LOOP_BLOCKED) -> Iterator[None]:
    """Bound the time that the receiver may take to answer in the body.

    Raises:
        NobodyListens: the receiver did not answer for `heartbeat_timeout_s`; `cause` asks about the likely reasons.
    """
    try:
        with anyio.fail_after(heartbeat_timeout_s):
            yield
    except TimeoutError:
        raise NobodyListens(
            f"expected the receiver at {url} to answer, got no answer for {heartbeat_timeout_s} s: {cause}"
        ) from None


def connect_message(
    transport: str, kind: str, name: str, tokenizer: TokenizerIdentity | None, ping_s: float = 0.0
) -> Connect:
    """Return the first message of a sender, under an identity of its own."""
    identity = b"p" + secrets.token_bytes(15)
    return Connect(PROTOCOL_VERSION, transport, kind, identity, name, os.getpid(), tokenizer, ping_s)


async def request_session(connection: Conversation, request: Connect) -> Accept:
    """Ask to join, and return the receiver's grant.

    Raises:
        ProtocolMismatch: the receiver carries another kind of record, or has another protocol version.
        TokenizersDiffer: it has another tokenizer.
        TooManySenders: it has granted all its places.
        MemberNameRequired, MemberNameInUse, TooManyMembers: it counts senders by name, and not this one.
        PeerClosed: it rejected for another reason, or disconnected.
    """
    answer = await _answer(connection, connection.send(request))
    if not isinstance(answer, Accept) or answer.version != PROTOCOL_VERSION:
        raise ProtocolMismatch(f"expected an Accept of protocol version {PROTOCOL_VERSION}, got {answer}")
    return answer


async def complete_handshake(connection: Conversation, sending: Awaitable[None]) -> None:
    """Answer an `Accept` by `sending` a segment, or Ready over tcp, and wait until this sender is admitted.

    Raises:
        OutOfSharedMemory: the receiver cannot map this sender's segment.
        OutOfFileDescriptors: the receiver has no descriptor left for it.
        PeerClosed: it rejected for another reason, or disconnected.
    """
    answer = await _answer(connection, sending)
    if not isinstance(answer, Ready):
        raise ProtocolMismatch(f"expected Ready, got {type(answer).__name__}")


async def _answer(connection: Conversation, sending: Awaitable[None]) -> Message:
    """Return the answer to a message. A receiver that rejects may answer and disconnect before it reads the message."""
    with suppress(anyio.BrokenResourceError):
        await sending
    try:
        answer = await connection.receive()
    except anyio.EndOfStream:
        raise PeerClosed("the receiver closed the connection without an answer") from None
    if isinstance(answer, Reject):
        raise REJECTIONS.get(answer.error, PeerClosed)(f"the receiver rejected this sender: {printable(answer.reason)}")
    return answer
