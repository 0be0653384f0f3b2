"""The moments in which senders are let in: many at once, and one that dies right then."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import pytest
from anyio.abc import UNIXSocketStream
from tests.failsafe import FAILSAFE_S
from tests.fixed_limits import set_limits

from penstock import TrajectoryGroup
from penstock._pipeline.channels.control_connection import ControlConnection
from penstock._pipeline.channels.handshake import complete_handshake
from penstock._pipeline.channels.segment import SegmentWriter
from penstock._pipeline.weights import weight_subscriptions
from penstock._schemas import control
from penstock.channels import connect, connect_with_replay, serve
from penstock.errors import NobodyListens, OutOfSharedMemory, PeerClosed, PeerLost, ProtocolMismatch, TokenizersDiffer
from penstock.policies import TokenizerIdentity, tokenizer_identity
from penstock.testing import group
from penstock.weights import WeightPublisher, WeightSubscriber


def frame(message: control.Message) -> bytes:
    body = control.encode(message)
    return struct.pack("<I", len(body)) + body


@pytest.mark.parametrize("url", ["shm://", "tcp://127.0.0.1:0"])
async def test_as_many_senders_as_there_may_be_can_come_at_once(url: str) -> None:
    senders = 4

    async def send(to: str, number: int) -> None:
        async with connect(to, TrajectoryGroup, name=f"member {number}") as outbox:
            await outbox.send(group())

    async with (
        serve(url, TrajectoryGroup, capacity_bytes=2**20, senders=senders, max_senders=senders) as inbox,
        anyio.create_task_group() as tasks,
    ):
        for number in range(senders):
            tasks.start_soon(send, inbox.url, number)
        received = [record async for record in inbox]

        assert len(received) == senders


def knock_and_die(url: str) -> None:
    """Send all messages of a sender's handshake, and disconnect before the answer."""
    hello = control.Connect(control.PROTOCOL_VERSION, "shm", "group", b"p" + bytes(15), "short-lived", 1)
    with socket.socket(socket.AF_UNIX) as control_connection:
        control_connection.connect(str(Path(url.removeprefix("shm://")) / "control"))
        control_connection.sendall(frame(hello))
        control_connection.recv(4096)
        segment = SegmentWriter(16, 4096)
        offer = control.SegmentOffer(segment.slots, segment.slot_bytes, segment.nbytes)
        socket.send_fds(control_connection, [frame(offer)], [segment.fd])
        segment.close()


async def test_a_sender_that_dies_as_it_is_let_in_does_not_keep_the_stream_open() -> None:
    for _ in range(5):
        async with serve("shm://", TrajectoryGroup) as inbox:
            await anyio.to_thread.run_sync(knock_and_die, inbox.url)

            with anyio.fail_after(FAILSAFE_S):
                with pytest.raises(PeerLost, match="short-lived"):
                    await inbox.receive()
                with pytest.raises(anyio.EndOfStream):
                    await inbox.receive()


async def connection_closed_after(*sent: control.Message) -> ControlConnection:
    """Return the sender's side of a connection whose receiver sent these messages, and closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    for message in sent:
        theirs.sendall(frame(message))
    theirs.close()
    return ControlConnection(await UNIXSocketStream.from_socket(ours))


async def test_a_receiver_that_went_before_it_took_the_segment_is_gone_and_no_broken_socket() -> None:
    async with await connection_closed_after() as control_connection:
        with pytest.raises(PeerClosed, match="closed the connection without an answer"):
            await complete_handshake(control_connection, control_connection.send(control.SegmentOffer(1, 4096, 4096)))


async def test_a_message_that_a_receiver_sent_before_it_closed_is_read() -> None:
    async with await connection_closed_after(control.Reject("OutOfSharedMemory", "no room")) as control_connection:
        with pytest.raises(OutOfSharedMemory, match="the receiver rejected this sender: no room"):
            await complete_handshake(control_connection, control_connection.send(control.SegmentOffer(1, 4096, 4096)))


# -- tokenizers --------------------------------------------------------------------------------------------------------


class Words:
    """A tokenizer, as far as its identity goes."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def get_vocab(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(self.words)}


OURS, THEIRS = Words("yes", "no"), Words("no", "yes")


@pytest.mark.parametrize("url", ["shm://", "tcp://127.0.0.1:0"])
@pytest.mark.parametrize("other", [THEIRS, tokenizer_identity(THEIRS)])
async def test_a_sender_of_another_tokenizer_is_refused_with_both_identities(
    url: str, other: Words | TokenizerIdentity
) -> None:
    async with serve(url, TrajectoryGroup, tokenizer=OURS) as inbox:
        with pytest.raises(TokenizersDiffer) as refused:
            async with connect(inbox.url, TrajectoryGroup, name="sampler", tokenizer=other):
                pass
        rejected = inbox.rejected
        async with connect(inbox.url, TrajectoryGroup, tokenizer=OURS) as outbox:
            await outbox.send(group())

    first, *identities = str(refused.value).splitlines()
    assert (
        first == "the receiver rejected this sender: the receiver and sampler have tokenizers of different vocabulary"
    )
    assert identities == [f"  {tokenizer_identity(OURS)}", f"  {tokenizer_identity(THEIRS)}"]
    assert rejected == 1


@pytest.mark.parametrize("url", ["shm://", "tcp://127.0.0.1:0"])
@pytest.mark.parametrize(("here", "there"), [(OURS, Words("yes", "no")), (OURS, None), (None, THEIRS)])
async def test_equal_and_unknown_tokenizers_are_accepted_by_a_receiver(
    url: str, here: Words | None, there: Words | None
) -> None:
    async with serve(url, TrajectoryGroup, tokenizer=here) as inbox:
        async with connect(inbox.url, TrajectoryGroup, tokenizer=there) as outbox:
            await outbox.send(group())
            received = await inbox.receive()

        assert received.id == group().id
        assert not inbox.rejected


async def test_a_sender_that_outlives_its_receiver_does_not_ask_again_where_it_has_another_tokenizer() -> None:
    async with serve("shm://", TrajectoryGroup, tokenizer=OURS) as inbox:
        with anyio.fail_after(FAILSAFE_S), pytest.raises(TokenizersDiffer, match="different vocabulary"):
            async with connect_with_replay(inbox.url, tokenizer=THEIRS) as outbox:
                await outbox.send(group())


async def test_a_tokenizer_without_an_identity_is_no_answer() -> None:
    with pytest.raises(ValueError, match="tokenizer: expected one with get_vocab"):
        serve("shm://", TrajectoryGroup, tokenizer=object())
    with pytest.raises(ValueError, match="tokenizer: expected one with get_vocab"):
        connect("shm:///nowhere", TrajectoryGroup, tokenizer=object())


# -- weights -----------------------------------------------------------------------------------------------------------

TENSORS = {"weight": np.zeros((4, 3), np.float32)}


async def test_a_subscriber_of_another_protocol_version_is_refused_by_both_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = weight_subscriptions.refusal
    aged = lambda sent, **rest: original(msgspec.structs.replace(sent, version=99), **rest)  # noqa: E731
    monkeypatch.setattr(weight_subscriptions, "refusal", aged)

    async with WeightPublisher(TENSORS) as publisher:
        with pytest.raises(ProtocolMismatch, match=f"expected protocol version {control.PROTOCOL_VERSION}, got 99"):
            async with WeightSubscriber(publisher.url):
                pass


async def test_a_subscriber_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ControlConnection, "same_user", False)

    async with WeightPublisher(TENSORS) as publisher:
        with pytest.raises(ProtocolMismatch, match="expected a subscriber that runs as the publisher's user"):
            async with WeightSubscriber(publisher.url):
                pass


async def test_a_publisher_that_accepts_and_sends_nothing_is_waited_for_until_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, RECONNECT_TIMEOUT_S=0.01)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "control"))
        server.listen()

        with pytest.raises(NobodyListens, match=r"got no answer for 0\.01 s: is its process stopped"):
            async with WeightSubscriber(f"weights://{tmp_path}"):
                pass
