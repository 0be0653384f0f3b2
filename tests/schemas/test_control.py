from collections.abc import Callable
from typing import get_args

import msgspec
import pytest

from penstock import GroupId
from penstock._schemas import control as c
from penstock._schemas.descriptor import Descriptor
from penstock.errors import ProtocolMismatch

MESSAGES: list[c.Message] = [
    c.Connect(c.PROTOCOL_VERSION, "shm", "group", b"identity", "worker 0", 123),
    c.Accept(c.PROTOCOL_VERSION, "ipc:///x", "trainer", 8, 2**30, 1024),
    c.Reject("TooManySenders", "reason"),
    c.SegmentOffer(10, 1024, 10_240),
    c.Ready(),
    c.Ready(bytes(32)),
    c.Publish((Descriptor(1, 1, 2, 3, 4, 5), Descriptor(9, 8, 0, 1, 2**40, 2**33))),
    c.Telemetry(b"payload"),
    c.Close(7),
    c.CreditGrant(((0, 1, 1), (5, 2**40, 8))),
    c.CreditRequest(),
    c.Outcomes(((GroupId("env", "17"), (0, 3), "trained", 4),)),
    c.CloseAck(),
    c.Closed(),
    c.Subscribe(c.PROTOCOL_VERSION, "worker 0", 123, bytes(16)),
    c.Weights(c.PROTOCOL_VERSION, "trainer", 2**62, 2**40, 0, c.DeviceHandle("uuid", 2**40, bytes(64))),
    c.NewVersion(4),
    c.Pause(1),
    c.PauseAck(1),
    c.ViewsInUse(3),
    c.Resume(),
    c.EndOfWeights(),
    c.WeightLayout(c.PROTOCOL_VERSION, "trainer", 2**62, 0, b"header", bytes(16), bytes(32)),
    c.ChunkRequest(4, 7),
    c.Chunk(4, 7, bytes(16), bytes(100)),
    c.DeltaRequest(4, 3, 7),
    c.SpanDelta(4, 7, bytes(16), bytes(100)),
    c.NoDelta(4, 7),
    c.VersionGone(4),
    c.MessageCount(9),
]


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(["Nonsense", 1]),
        msgspec.msgpack.encode(["Close", "seven"]),
        msgspec.msgpack.encode(["Close"]),
        msgspec.msgpack.encode(["Close", 7, 8]),
        msgspec.msgpack.encode(["Publish", [[1, 2, 3, 4]]]),
        msgspec.msgpack.encode({"type": "Close", "sequence": 7}),
    ],
    ids=range(8),
)
def test_an_invalid_message_is_refused(junk: bytes) -> None:
    with pytest.raises(ProtocolMismatch, match=f"expected a message of protocol version {c.PROTOCOL_VERSION}"):
        c.decode(junk)


def test_more_bundles_than_go_into_one_message_are_refused() -> None:
    bundles = (Descriptor(1, 1, 0, 1, 1, 64),) * c.MOST_DESCRIPTORS
    assert c.decode(c.encode(c.Publish(bundles))) == c.Publish(bundles)

    with pytest.raises(ProtocolMismatch, match="length <= 4096"):
        c.decode(c.encode(c.Publish((*bundles, bundles[0]))))


@pytest.mark.parametrize("repetition", [-1, 65_536, 2**40])
def test_a_repetition_that_no_ledger_counts_is_refused(repetition: int) -> None:
    with pytest.raises(ProtocolMismatch, match="expected a message"):
        c.decode(c.encode(c.Outcomes(((GroupId("e", "1"), (repetition,), "trained", 1),))))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_only_messages_of_a_sender_are_decoded_from_a_sender(message: c.Message) -> None:
    encoded = c.encode(message)
    assert c.decode(encoded) == message
    if isinstance(message, get_args(c.SenderMessage)):
        assert c.decode_of_sender(encoded) == message
    else:
        with pytest.raises(ProtocolMismatch, match="expected a message of a sender of protocol version"):
            c.decode_of_sender(encoded)


NAMED = [
    lambda name: c.Connect(c.PROTOCOL_VERSION, "shm", "group", b"identity", name, 123),
    lambda name: c.Accept(c.PROTOCOL_VERSION, "ipc:///x", name, 8, 2**30, 1024),
    lambda name: c.Subscribe(c.PROTOCOL_VERSION, name, 123),
    lambda name: c.Weights(c.PROTOCOL_VERSION, name, 2**62, 2**40, 0),
]


@pytest.mark.parametrize("named", NAMED)
@pytest.mark.parametrize("name", ["a\nb", "\x1b[31mred", "a\x00", "\u202eright to left", "n" * 129])
def test_a_name_that_is_long_or_not_printable_is_refused_and_quoted_so_that_it_can_be_printed(
    named: Callable[[str], c.Message], name: str
) -> None:
    with pytest.raises(ValueError, match="name: expected at most 128 printable characters") as sent:
        named(name)
    fields = [name if field == "@" else field for field in msgspec.msgpack.decode(c.encode(named("@")))]
    with pytest.raises(ProtocolMismatch, match="name: expected at most 128 printable characters") as received:
        c.decode(msgspec.msgpack.encode(fields))

    assert str(sent.value).isprintable()
    assert str(received.value).isprintable()
