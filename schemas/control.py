"""Every message that two ends exchange, as one tagged union with a protocol version. Strictly decoded, never unpickled.

Three conversations. At the *door* of a receiver, a stream socket, a sender introduces itself and stays for life; over
ZeroMQ, the two ends exchange descriptors, credit and endings; at the door of a weights publisher, subscribers learn of
new versions and are paused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec

from .descriptor import Descriptor
from .errors import UNREADABLE, ProtocolMismatch
from .ids import MAX_REPETITION_ID, GroupId
from .tokenizer import TokenizerIdentity

__all__ = [
    "PROTOCOL_VERSION",
    "Accept",
    "Close",
    "CloseAck",
    "Closed",
    "Connect",
    "CreditGrant",
    "CreditRequest",
    "DeviceHandle",
    "EndOfWeights",
    "Leaving",
    "Message",
    "NewVersion",
    "Outcomes",
    "Pause",
    "PauseAck",
    "Publish",
    "Ready",
    "Reject",
    "Resume",
    "SegmentOffer",
    "SenderMessage",
    "Subscribe",
    "Telemetry",
    "ViewsInUse",
    "Weights",
    "check_name",
    "decode",
    "decode_of_sender",
    "encode",
    "printable",
]

PROTOCOL_VERSION = 4
"""Raised with every change that an older peer would misread; peers of different versions refuse each other by name."""


MOST_DESCRIPTORS = 4096
"""Bundles in one message: some tens go together. More are refused before there is memory, or time, for each."""

Repetition: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_REPETITION_ID)]


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """An array on the wire: the tag, then the fields in order."""


MOST_NAME_CHARACTERS = 128


def check_name(name: str) -> str:
    """Return the name of a peer, which messages and logs quote as it is.

    Raises:
        ValueError: it is too long, or holds characters that a terminal or a log would not print, such as newlines.
    """
    if len(name) > MOST_NAME_CHARACTERS or not name.isprintable():
        shown = f"{name[:MOST_NAME_CHARACTERS]!r} ({len(name)} characters)"
        raise ValueError(f"name: expected at most {MOST_NAME_CHARACTERS} printable characters, got {shown}")
    return name


def printable(said: str) -> str:
    """Return what a peer said with all that a terminal or a log would not print as escapes; line breaks stay."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in said)


class _Named(_Message, frozen=True):
    """A message of a peer that says its name."""

    def __post_init__(self) -> None:
        check_name(self.name)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


# -- at the door ---------------------------------------------------------------------------------------------------


class Connect(_Named, frozen=True):
    """A sender asks to be let in."""

    version: int
    transport: str
    """shm or tcp."""
    kind: str
    """What it will send: "group" or "batch"."""
    identity: bytes
    """The name of its ZeroMQ socket: 16 random bytes."""
    name: str
    """What its script calls it, the same after every restart; empty where it was given none."""
    pid: int
    tokenizer: TokenizerIdentity | None = None
    """What made the token ids that it will send; none where it does not say."""


class Accept(_Named, frozen=True):
    """The receiver lets it in, and says what it may use."""

    version: int
    endpoint: str
    """Where the ZeroMQ socket listens."""
    name: str
    """Who the receiver is, for messages."""
    capacity: int
    """Records that this sender may have in flight."""
    capacity_bytes: int
    """Bytes that this sender may have in flight."""
    slot_bytes: int
    """Bytes of a slot (shm)."""
    checksum: bool = False
    """Whether bundles must come with a checksum."""
    counts_members: bool = False
    """Whether it counts senders by name, and waits until each has said that it is done."""


class Reject(_Message, frozen=True):
    """The receiver does not let it in."""

    error: str
    """The error that the sender raises, by name."""
    reason: str


class SegmentOffer(_Message, frozen=True):
    """A sender hands over its segment; the file descriptor travels with this message."""

    slots: int
    slot_bytes: int
    nbytes: int
    """Bytes of the whole segment, header table included."""


class Ready(_Message, frozen=True):
    """The receiver knows the sender's socket; descriptors may come."""


# -- over ZeroMQ, sender to receiver -------------------------------------------------------------------------------


class Publish(_Message, frozen=True):
    """Bundles that lie ready."""

    descriptors: Annotated[tuple[Descriptor, ...], msgspec.Meta(max_length=MOST_DESCRIPTORS)]


class CreditRequest(_Message, frozen=True):
    """What credit the receiver holds back shall come now: the next record has no bytes, or somebody looks."""


class Telemetry(_Message, frozen=True):
    """What the sending process has observed: an encoded `telemetry.Observations`."""

    payload: bytes


Leaving: TypeAlias = Literal["done", "staying", "failed"]
"""How a sender leaves. done: nothing more comes from it · staying: likewise, and it stays connected until it has heard
that all is saved, and then says `done` · failed: the body of its `async with` raised or was cancelled, so more may be
to come."""


class Close(_Message, frozen=True):
    """Nothing more comes on this connection; `sequence` is that of the sender's last record."""

    sequence: int
    how: Leaving = "done"


# -- over ZeroMQ, receiver to sender -------------------------------------------------------------------------------


class CreditGrant(_Message, frozen=True):
    """Credit: of which spans how many records more are done with, as (first slot, generation, records)."""

    spans: tuple[tuple[int, int, int], ...]


class Outcomes(_Message, frozen=True):
    """How trajectories ended: (group, repetitions, state, optimizer step). "trained" is the commit.

    "saved" is told of those that no other receiver needs: a checkpoint holds them, or they were dropped.
    """

    entries: tuple[tuple[GroupId, tuple[Repetition, ...], str, int], ...]


class CloseAck(_Message, frozen=True):
    """The receiver has everything up to the sender's goodbye."""


class Closed(_Message, frozen=True):
    """The receiver takes no more."""


# -- at the door of a weights publisher ----------------------------------------------------------------------------


class Subscribe(_Named, frozen=True):
    """A subscriber asks for the weights."""

    version: int
    name: str
    """Who it is, for messages."""
    pid: int


class DeviceHandle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Memory of a device that another process may open while its owner lives."""

    device: str
    """The device's UUID: its number may differ from process to process."""
    nbytes: int
    handle: bytes
    """What the driver gave out for it (CUipcMemHandle)."""


class Weights(_Named, frozen=True):
    """The publisher hands over its segment; the file descriptor travels with this message."""

    version: int
    name: str
    """Who the publisher is, for messages."""
    generation: int
    """Drawn when the segment was made: a segment that says another was made by another publisher."""
    nbytes: int
    """Bytes of the whole segment."""
    pause: int
    """Number of the pause that is on; 0 where sampling may go on."""
    device: DeviceHandle | None = None
    """Where the buffers lie, if not in the segment."""


class NewVersion(_Message, frozen=True):
    """Newer weights lie ready."""

    policy_version: int


class Pause(_Message, frozen=True):
    """Sampling is to stop; the subscriber answers when it has."""

    number: int


class PauseAck(_Message, frozen=True):
    """Sampling has stopped, as pause `number` asked."""

    number: int


class ViewsInUse(_Message, frozen=True):
    """The subscriber's model is views of publication `sequence`, and samples from it; 0 where it does not."""

    sequence: int


class Resume(_Message, frozen=True):
    """Sampling may go on."""


class EndOfWeights(_Message, frozen=True):
    """The publisher is done: the weights that lie ready are the last."""


Message = (
    Connect
    | Accept
    | Reject
    | SegmentOffer
    | Ready
    | Publish
    | CreditRequest
    | Telemetry
    | Close
    | CreditGrant
    | Outcomes
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
)

encode = msgspec.msgpack.Encoder().encode
"""Any message as bytes."""

_decode: Callable[[bytes | memoryview], Message] = msgspec.msgpack.Decoder(Message).decode

SenderMessage: TypeAlias = Publish | CreditRequest | Telemetry | Close
"""What a sender says over ZeroMQ."""

_decode_of_sender: Callable[[bytes | memoryview], SenderMessage] = msgspec.msgpack.Decoder(SenderMessage).decode

M = TypeVar("M")


def decode(encoded: bytes | memoryview) -> Message:
    """The message that `encoded` holds.

    Raises:
        ProtocolMismatch: it holds none that this version knows.
    """
    return _decoded(_decode, encoded, "a message")


def decode_of_sender(encoded: bytes | memoryview) -> SenderMessage:
    """The same of a sender: what only others say may be long, and is not looked at.

    Raises:
        ProtocolMismatch: it is nothing that a sender says.
    """
    return _decoded(_decode_of_sender, encoded, "what a sender says")


def _decoded(decode: Callable[[bytes | memoryview], M], encoded: bytes | memoryview, expected: str) -> M:
    try:
        return decode(encoded)
    except UNREADABLE as error:
        raise ProtocolMismatch(
            f"expected {expected} of protocol version {PROTOCOL_VERSION}, got {len(encoded)} other bytes: {error}"
        ) from None
