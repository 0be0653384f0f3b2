"""Every message that two ends exchange, as one tagged union with a protocol version. Strictly decoded, never unpickled.

There are four protocols. On a *control connection*, a stream socket, a sender completes the handshake with a receiver
and stays connected; over ZeroMQ, the two ends exchange descriptors, credit and outcomes; on the control connection of a
weights publisher, subscribers learn of new versions and are paused; over ZeroMQ, the mirror of another host learns the
same, and asks for the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec

from .bounds import (
    MOST_ENTRIES,
    Count,
    Hash,
    Line,
    Name,
    Payload,
    Signed,
    SmallCount,
    Text,
)
from .descriptor import Descriptor
from .errors import UNREADABLE, InvalidConfig, ProtocolMismatch
from .ids import MAX_REPETITION_ID, GroupId
from .tokenizer import TokenizerIdentity

PROTOCOL_VERSION = 12
"""Incremented with every change that an older peer would misread; peers of different versions reject each other by
name."""


MOST_DESCRIPTORS = MOST_ENTRIES
"""Bundles in one message: some tens go together. More are rejected before memory, or time, is spent on each."""

CHUNK_BYTES = 2**20
"""Bytes of a chunk of weights, except of the last one: copied and hashed in a fraction of a millisecond."""

SPAN_CHUNKS = 8
"""Chunks of a span, for which a delta is sent: some hundred kilobytes of a version of which 2 % changed, so that the
cost of a message is small beside that of its bytes."""

LARGEST_DELTA_BYTES = 4 * (2 * (SPAN_CHUNKS * CHUNK_BYTES // 2) // 5)
"""Bytes of a delta in which 40 % of the 16-bit words of a span changed; see `span_delta.largest_delta`."""

Repetition: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_REPETITION_ID)]

Repetitions: TypeAlias = Annotated[tuple[Repetition, ...], msgspec.Meta(max_length=MAX_REPETITION_ID + 1)]


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """An array on the wire: the tag, then the fields in order."""


MOST_NAME_CHARACTERS = 128


def check_name(name: str) -> str:
    """Return the name of a peer. Errors and logs quote it unchanged.

    Raises:
        InvalidConfig: it is too long, or holds characters that a terminal or a log would not print, such as newlines.
    """
    if len(name) > MOST_NAME_CHARACTERS or not name.isprintable():
        shown = f"{name[:MOST_NAME_CHARACTERS]!r} ({len(name)} characters)"
        raise InvalidConfig(f"name: expected at most {MOST_NAME_CHARACTERS} printable characters, got {shown}")
    return name


def printable(text: str) -> str:
    """Return `text` of a peer with escapes for all that a terminal or a log would not print; line breaks stay."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


class _Named(_Message, frozen=True):
    """A message with the name of its peer."""

    def __post_init__(self) -> None:
        check_name(self.name)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


# -- handshake -----------------------------------------------------------------------------------------------------


class Connect(_Named, frozen=True):
    """A sender asks to join."""

    version: SmallCount
    transport: Name
    """shm or tcp."""
    kind: Name
    """The kind of record that it will send: "group" or "batch"."""
    identity: Hash
    """The identity of its ZeroMQ socket: 16 random bytes."""
    name: Name
    """The name that its script gave it, the same after every restart; empty without one."""
    pid: SmallCount
    tokenizer: TokenizerIdentity | None = None
    """The tokenizer of the token ids that it will send; `None` if unknown."""
    ping_s: Annotated[float, msgspec.Meta(ge=0, le=3)] = 0.0
    """Seconds between two heartbeats of its ZeroMQ socket, over tcp."""


class Accept(_Named, frozen=True):
    """The receiver accepts the sender, and grants it credit."""

    version: SmallCount
    endpoint: Line
    """The endpoint of the ZeroMQ socket."""
    name: Name
    """The name of the receiver, for messages."""
    capacity: Count
    """Records that this sender may have in flight."""
    capacity_bytes: Count
    """Bytes that this sender may have in flight."""
    slot_bytes: Count
    """Bytes of a slot (shm)."""
    checksum: bool = False
    """True if bundles must come with a checksum."""
    counts_members: bool = False
    """True if the receiver counts senders by name, and waits until each is done."""


class Reject(_Message, frozen=True):
    """The receiver rejects the sender."""

    error: Name
    """The name of the error that the sender raises."""
    reason: Text


class SegmentOffer(_Message, frozen=True):
    """A sender passes its segment; the file descriptor travels with this message."""

    slots: Count
    slot_bytes: Count
    nbytes: Count
    """Bytes of the whole segment, header table included."""


class Ready(_Message, frozen=True):
    """The handshake is complete; descriptors may follow."""

    proof: Hash = b""
    """Of a mirror: the proof that it has the key; see `ChannelKey.proof`."""


# -- over ZeroMQ, sender to receiver -------------------------------------------------------------------------------


class Publish(_Message, frozen=True):
    """Bundles that are published."""

    descriptors: Annotated[tuple[Descriptor, ...], msgspec.Meta(max_length=MOST_DESCRIPTORS)]


class MessageCount(_Message, frozen=True):
    """The messages that were sent before it on a connection over tcp; the side that serves answers with its count."""

    sent: Count


class CreditRequest(_Message, frozen=True):
    """A request for the withheld credit: the next record needs bytes, or statistics are read."""


class Telemetry(_Message, frozen=True):
    """Observations of the sending process: an encoded `telemetry.Observations`."""

    payload: Payload


Leaving: TypeAlias = Literal["done", "staying", "failed"]
"""The way a sender closes. done: its last record is sent · staying: likewise, and it stays connected until it knows
that all is saved, and then sends `done` · failed: the body of its `async with` raised or was cancelled, so more may
follow on another connection."""


class Close(_Message, frozen=True):
    """The sender is done with this connection; `sequence` is that of its last record."""

    sequence: Count
    how: Leaving = "done"


# -- over ZeroMQ, receiver to sender -------------------------------------------------------------------------------


class CreditGrant(_Message, frozen=True):
    """Credit: newly released records of spans, as (first slot, generation, records)."""

    spans: Annotated[tuple[tuple[Count, Count, Count], ...], msgspec.Meta(max_length=MOST_ENTRIES)]


PUBLISHED = "published"
"""The state in an entry of `Outcomes` that has a version of the weights in place of a step."""


class Outcomes(_Message, frozen=True):
    """The outcomes of trajectories: (group, repetitions, state, optimizer step). "trained" is the commit.

    "saved" is sent for those that no other receiver needs: a checkpoint holds them, or they were dropped. An entry
    whose group is empty is a notice of the step, or of a version of the weights (`PUBLISHED`).
    """

    entries: Annotated[tuple[tuple[GroupId, Repetitions, Name, Count], ...], msgspec.Meta(max_length=MOST_ENTRIES)]


class Instruction(_Message, frozen=True):
    """A message of the pipeline to a worker that has joined it: an encoded `worker_messages.WorkerInstruction`."""

    payload: Payload


class CloseAck(_Message, frozen=True):
    """The receiver has everything up to the sender's Close."""


class Closed(_Message, frozen=True):
    """The receiver has closed the channel."""


# -- control connection of a weights publisher ----------------------------------------------------------------------


class Subscribe(_Named, frozen=True):
    """A subscriber asks for the weights."""

    version: SmallCount
    name: Name
    """The name of the subscriber, for messages."""
    pid: SmallCount
    nonce: Hash = b""
    """Of a mirror: random bytes that the publisher proves its key for."""


class DeviceHandle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Memory of a device that another process may open while its owner lives."""

    device: Name
    """The device's UUID: its number may differ from process to process."""
    nbytes: Count
    handle: Hash
    """The driver's handle for it (CUipcMemHandle)."""


class Weights(_Named, frozen=True):
    """The publisher passes its segment; the file descriptor travels with this message."""

    version: SmallCount
    name: Name
    """The name of the publisher, for messages."""
    generation: Count
    """Drawn when the segment was made: a segment with another value was made by another publisher."""
    nbytes: Count
    """Bytes of the whole segment."""
    pause: Count
    """Number of the pause that is on; 0 where sampling may go on."""
    device: DeviceHandle | None = None
    """The memory of the buffers, if they do not lie in the segment."""


class NewVersion(_Message, frozen=True):
    """Newer weights are published."""

    policy_version: Signed


class Pause(_Message, frozen=True):
    """Sampling must stop; the subscriber answers when it has."""

    number: Count


class PauseAck(_Message, frozen=True):
    """Sampling has stopped, as pause `number` asked."""

    number: Count


class ViewsInUse(_Message, frozen=True):
    """The subscriber's model consists of views of publication `sequence`, and samples from it; 0 where it does not."""

    sequence: Count


class Resume(_Message, frozen=True):
    """Sampling may go on."""


class EndOfWeights(_Message, frozen=True):
    """The publisher is done: the published weights are the last."""


# -- a weights publisher and the mirror of another host, over ZeroMQ; besides the messages above -------------------


class WeightLayout(_Named, frozen=True):
    """The publisher accepts a mirror; the mirror answers Ready. The layout of each version follows from the header."""

    version: SmallCount
    name: Name
    """The name of the publisher, for messages."""
    generation: Count
    """See `Weights`."""
    pause: Count
    """Number of the pause that is on; 0 where sampling may go on."""
    header: Payload
    """The header of a safetensors file, with its length."""
    nonce: Hash
    """Random bytes that the mirror proves its key for."""
    proof: Hash
    """The proof that the publisher has the key; see `ChannelKey.proof`."""


class ChunkRequest(_Message, frozen=True):
    """The mirror asks for a chunk of a version."""

    policy_version: Signed
    index: Count


class Chunk(_Message, frozen=True):
    """A chunk of a version."""

    policy_version: Signed
    index: Count
    xxh3: Hash
    """The hash of `content`."""
    content: Annotated[bytes, msgspec.Meta(max_length=CHUNK_BYTES)]


class DeltaRequest(_Message, frozen=True):
    """The mirror asks for the changes of a span of a version against a version that it has whole."""

    policy_version: Signed
    base_version: Signed
    index: Count


class SpanDelta(_Message, frozen=True):
    """The changes of a span of a version against the version that was requested as base."""

    policy_version: Signed
    index: Count
    xxh3: Hash
    """The hash of the bytes of the span in this version: it tells a base that differs, too."""
    content: Annotated[bytes, msgspec.Meta(max_length=LARGEST_DELTA_BYTES)]
    """A delta; see `span_delta`."""


class NoDelta(_Message, frozen=True):
    """There are no changes of this span to send: the mirror requests its chunks."""

    policy_version: Signed
    index: Count


class VersionGone(_Message, frozen=True):
    """A version was overwritten: no more chunks and deltas of it can be sent."""

    policy_version: Signed


Message = (
    Connect
    | Accept
    | Reject
    | SegmentOffer
    | Ready
    | Publish
    | MessageCount
    | CreditRequest
    | Telemetry
    | Close
    | CreditGrant
    | Outcomes
    | Instruction
    | CloseAck
    | Closed
    | Subscribe
    | Weights
    | NewVersion
    | Pause
    | PauseAck
    | ViewsInUse
    | Resume
    | EndOfWeights
    | WeightLayout
    | ChunkRequest
    | Chunk
    | DeltaRequest
    | SpanDelta
    | NoDelta
    | VersionGone
)

encode = msgspec.msgpack.Encoder().encode
"""Any message as bytes."""

_decode: Callable[[bytes | memoryview], Message] = msgspec.msgpack.Decoder(Message).decode

SenderMessage: TypeAlias = Publish | MessageCount | CreditRequest | Telemetry | Close
"""The messages that a sender sends over ZeroMQ."""

_decode_of_sender: Callable[[bytes | memoryview], SenderMessage] = msgspec.msgpack.Decoder(SenderMessage).decode

M = TypeVar("M")


def decode(encoded: bytes | memoryview) -> Message:
    """Return the message that `encoded` holds.

    Raises:
        ProtocolMismatch: this version knows no such message.
    """
    return _decoded(_decode, encoded, "a message")


def decode_of_sender(encoded: bytes | memoryview) -> SenderMessage:
    """Decode a message of a sender; those that only other peers send may be long, and are not decoded.

    Raises:
        ProtocolMismatch: it is no message that a sender sends.
    """
    return _decoded(_decode_of_sender, encoded, "a message of a sender")


def _decoded(decode: Callable[[bytes | memoryview], M], encoded: bytes | memoryview, expected: str) -> M:
    try:
        return decode(encoded)
    except UNREADABLE as error:
        raise ProtocolMismatch(
            f"expected {expected} of protocol version {PROTOCOL_VERSION}, got {len(encoded)} other bytes: {error}"
        ) from None
