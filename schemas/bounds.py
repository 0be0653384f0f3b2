"""The bounds of the fields of messages: each number, text and sequence that a peer sends has one, checked at decoding.

A peer may send anything. Each value must fit the words that it is stored in, and take no more memory than the message
has bytes times a small factor. Senders cut texts of their users, such as that of an error, to the bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, TypeAlias, TypeVar

from msgspec import Meta

T = TypeVar("T")

LARGEST = 2**63 - 1
"""The largest integer in a signed word of 64 bits."""

Count: TypeAlias = Annotated[int, Meta(ge=0, le=LARGEST)]
"""A number of things, of bytes or of an optimizer step; or a random number of 63 bits."""

SmallCount: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""A protocol version, a process id, a place among workers."""

Signed: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=LARGEST)]
"""A version of weights, or the id of a token; −1 may stand for an absent one."""

Measure: TypeAlias = Annotated[float, Meta(description="may be infinite or NaN, as a metric of a user may")]
"""A part of a metric. It is only added to others; no decision depends on it."""

LONGEST_NAME, LONGEST_LINE, LONGEST_TEXT = 256, 4096, 8192

LONGEST_TRACEBACK = 32_000
"""Characters: the events of a worker fit its pipe, so that sending one never blocks."""

Name: TypeAlias = Annotated[str, Meta(max_length=LONGEST_NAME)]
"""A kind, a transport, a state, a hash, the name of a metric."""

Line: TypeAlias = Annotated[str, Meta(max_length=LONGEST_LINE)]
"""A URL, a path, an id of a prompt, the phase of a start."""

Text: TypeAlias = Annotated[str, Meta(max_length=LONGEST_TEXT)]
"""A reason, for a reader."""

Traceback: TypeAlias = Annotated[str, Meta(max_length=LONGEST_TRACEBACK)]

LONGEST_PASSAGE = 64 * 2**20
"""Characters: the transport bounds the message before."""

Passage: TypeAlias = Annotated[str, Meta(max_length=LONGEST_PASSAGE)]
"""A prompt or a completion."""

Hash: TypeAlias = Annotated[bytes, Meta(max_length=64)]
"""A hash, or the handle of a device's memory."""

LARGEST_PAYLOAD = 128 * 2**20

Payload: TypeAlias = Annotated[bytes, Meta(max_length=LARGEST_PAYLOAD)]
"""Bytes that are decoded later, or stored: the transport bounds them before."""

MOST_ENTRIES = 4096
"""Entries of a sequence in one message; a sender splits a longer one."""

MOST_NAMES = 16_384
"""Names in one mapping."""


def batched(entries: Sequence[T], most: int) -> Iterator[tuple[T, ...]]:
    """Yield `entries` in order, at most `most` at a time.

    >>> list(batched("abcde", 2))
    [('a', 'b'), ('c', 'd'), ('e',)]
    """
    for first in range(0, len(entries), most):
        yield tuple(entries[first : first + most])


def cut(text: str, longest: int = LONGEST_TEXT) -> str:
    """Return `text`, or the part of it that a message may have.

    >>> cut("a long story", longest=7)
    'a long…'
    """
    return text if len(text) <= longest else text[: longest - 1] + "…"
