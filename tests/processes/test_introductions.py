"""The moments in which senders are let in: many at once, and one that dies right then."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from anyio.abc import UNIXSocketStream

from penstock import TrajectoryGroup, connect, serve
from penstock.errors import OutOfSharedMemory, PeerClosed, PeerLost
from penstock.pipeline.channels.door import Door
from penstock.pipeline.channels.introduction import let_in
from penstock.pipeline.channels.segment import SegmentWriter
from penstock.schemas import control
from penstock.testing import group


def frame(message: control.Message) -> bytes:
    body = control.encode(message)
    return struct.pack("<I", len(body)) + body


@pytest.mark.parametrize("url", ["shm://", "tcp://127.0.0.1:0"])
async def test_as_many_senders_as_there_may_be_can_come_at_once(url: str) -> None:
    senders = 4

    async def send(to: str) -> None:
        async with connect(to, TrajectoryGroup) as outbox:
            await outbox.send(group())

    async with (
        serve(url, TrajectoryGroup, capacity_bytes=2**20, senders=senders, max_senders=senders) as inbox,
        anyio.create_task_group() as tasks,
    ):
        for _ in range(senders):
            tasks.start_soon(send, inbox.url)
        received = [record async for record in inbox]

        assert len(received) == senders


def knock_and_die(url: str) -> None:
    """Introduce a sender fully, and die before it is told that it was let in."""
    hello = control.Hello(control.PROTOCOL_VERSION, "shm", "group", b"p" + bytes(15), "short-lived", 1)
    with socket.socket(socket.AF_UNIX) as door:
        door.connect(str(Path(url.removeprefix("shm://")) / "door"))
        door.sendall(frame(hello))
        door.recv(4096)
        segment = SegmentWriter(16, 4096)
        offer = control.Offer(segment.slots, segment.slot_bytes, segment.nbytes)
        socket.send_fds(door, [frame(offer)], [segment.fd])
        segment.close()


async def test_a_sender_that_dies_as_it_is_let_in_does_not_keep_the_stream_open() -> None:
    for _ in range(5):
        async with serve("shm://", TrajectoryGroup) as inbox:
            await anyio.to_thread.run_sync(knock_and_die, inbox.url)

            with anyio.fail_after(5):
                with pytest.raises(PeerLost, match="short-lived"):
                    await inbox.receive()
                with pytest.raises(anyio.EndOfStream):
                    await inbox.receive()


async def door_that_closed_after(*said: control.Message) -> Door:
    """The sender's side of a door whose receiver said this, and went without listening."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    for message in said:
        theirs.sendall(frame(message))
    theirs.close()
    return Door(await UNIXSocketStream.from_socket(ours))


async def test_a_receiver_that_went_before_it_took_the_segment_is_gone_and_no_broken_socket() -> None:
    async with await door_that_closed_after() as door:
        with pytest.raises(PeerClosed, match="closed the door without an answer"):
            await let_in(door, control.Offer(1, 4096, 4096))


async def test_what_a_receiver_said_before_it_went_is_heard() -> None:
    async with await door_that_closed_after(control.Refused("OutOfSharedMemory", "no room")) as door:
        with pytest.raises(OutOfSharedMemory, match="the receiver refused: no room"):
            await let_in(door, control.Offer(1, 4096, 4096))
