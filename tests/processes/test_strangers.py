"""A receiver rejects and counts peers that do not keep to the protocol; its other senders are not affected."""

import socket
import struct
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
import zmq
from tests import wire
from tests.failsafe import FAILSAFE_S
from tests.moments import moment

from penstock import TrainBatch, TrajectoryGroup
from penstock.channels import RemoteReceiver, RemoteSender, connect, serve
from penstock.errors import PeerClosed, PeerLost, ProtocolMismatch
from penstock.testing import group


def exchange(url: str, sent: bytes) -> bytes:
    """Send bytes to a control socket; return the bytes that the receiver sends until it closes."""
    with socket.socket(socket.AF_UNIX) as control_connection:
        control_connection.settimeout(FAILSAFE_S)
        control_connection.connect(str(Path(url.removeprefix("shm://")) / "control"))
        control_connection.sendall(sent)
        control_connection.shutdown(socket.SHUT_WR)
        received = b""
        while part := control_connection.recv(4096):
            received += part
        return received


async def still_works(inbox: RemoteReceiver[TrajectoryGroup]) -> None:
    async with connect(inbox.url, TrajectoryGroup) as outbox:
        await outbox.send(group(instance_id="after"))
        assert (await inbox.receive()).instance_id == "after"


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\x00",
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", 2**32 - 1),
        struct.pack("<I", 5) + b"\xc1\xc1\xc1\xc1\xc1",
        wire.frame(wire.close(0)),
        wire.frame(wire.connect_message()) + wire.frame(wire.segment_offer(2**60, 2**60, 2**60)),
    ],
    ids=range(7),
)
async def test_an_invalid_handshake_is_counted_and_changes_nothing(sent: bytes) -> None:
    async with serve("shm://", TrajectoryGroup) as inbox:
        await anyio.to_thread.run_sync(exchange, inbox.url, sent)
        await still_works(inbox)
        assert inbox.rejected == 1


async def test_another_protocol_version_is_refused_by_name() -> None:
    async with serve("shm://", TrajectoryGroup) as inbox:
        answer = await anyio.to_thread.run_sync(exchange, inbox.url, wire.frame(wire.connect_message(version=99)))
        await still_works(inbox)
    kind, refused = wire.decode(answer[4:])
    assert kind == "Reject"
    assert refused.error == "ProtocolMismatch"
    assert f"expected protocol version {wire.PROTOCOL_VERSION}, got 99" in refused.reason


async def test_a_sender_of_other_records_is_refused_with_both_kinds() -> None:
    async with serve("shm://", TrajectoryGroup) as inbox:
        with pytest.raises(ProtocolMismatch, match="expected group over shm, got batch over shm"):
            async with connect(inbox.url, TrainBatch):
                pass


async def test_messages_of_a_stranger_at_the_data_socket_are_ignored() -> None:
    async with serve("shm://", TrajectoryGroup) as inbox:
        stranger: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        stranger.connect(f"ipc://{inbox.url.removeprefix('shm://')}/data")
        stranger.send(wire.encode(wire.publish((1, 1, 0, 1, 1, 64))))
        stranger.send(b"\xc1" * 1000)
        while inbox.rejected < 2:
            await moment()
        stranger.close(linger=0)
        await still_works(inbox)


async def send_until_refused(outbox: RemoteSender[TrajectoryGroup]) -> None:
    while True:
        await outbox.send(group())


FORGED = [
    wire.publish((1, 1, 2**31, 1, 1, 64)),
    wire.publish((1, 1, 0, 2**31, 1, 64)),
    wire.publish((1, 1, 0, 1, 7, 64)),
    wire.publish((9, 1, 0, 1, 1, 64)),
    wire.publish((1, 1, -1, 1, 1, -64)),
    wire.publish((0, 0, 0, 1, 1, 64)),
    wire.publish((2**40, 2**40, 0, 1, 1, 64)),
    wire.close(3),
    wire.ready(),
]


@pytest.mark.parametrize("forged", FORGED, ids=range(len(FORGED)))
async def test_a_sender_that_breaks_the_protocol_is_cut_off_and_the_others_go_on(forged: Any) -> None:
    async with serve("shm://", TrajectoryGroup) as inbox:
        async with connect(inbox.url, TrajectoryGroup, name="the forger") as outbox:
            assert isinstance(outbox, RemoteSender)
            outbox._connection.send(forged)
            with pytest.raises(PeerLost, match=r"the forger .* violated the protocol and was disconnected"):
                await inbox.receive()
            with pytest.raises((PeerClosed, PeerLost)):
                await send_until_refused(outbox)
        await still_works(inbox)
        assert inbox.rejected >= 1


async def test_a_sender_that_breaks_the_protocol_twice_is_reported_lost_once() -> None:
    async with serve("shm://", TrajectoryGroup) as inbox, connect(inbox.url, TrajectoryGroup, name="forger") as outbox:
        assert isinstance(outbox, RemoteSender)
        outbox._connection.send(wire.publish((1, 1, 0, 1, 7, 64), (2, 1, 0, 1, 7, 64)))
        with pytest.raises(PeerLost, match="was disconnected"):
            await inbox.receive()
        with pytest.raises(anyio.EndOfStream):
            await inbox.receive()
        assert inbox.rejected == 1


NEVER_DUE = [(5, 1, 1), (0, 99, 1), (0, 1, 9), (0, 1, 0), (0, 1, -1)]


@pytest.mark.parametrize("sent", [*(wire.encode(wire.credit_grant(span)) for span in NEVER_DUE), b"\xc1"])
async def test_a_receiver_that_breaks_the_protocol_is_lost_for_its_sender(sent: bytes) -> None:
    async with serve("shm://", TrajectoryGroup) as inbox, connect(inbox.url, TrajectoryGroup) as outbox:
        await outbox.send(group(instance_id="0"))
        await inbox.receive()
        peer = next(iter(inbox.peers))
        inbox.peers.router._socket.send_multipart([peer.identity, sent])
        assert isinstance(outbox, RemoteSender)
        with anyio.fail_after(FAILSAFE_S):
            await outbox.wait_failed()
        with pytest.raises(PeerLost, match="the receiver, violated the protocol"):
            await outbox.send(group(instance_id="1"))
