"""The moments in which senders are let in: many at once, and one that dies right then."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from penstock import TrajectoryGroup, connect, serve
from penstock.errors import PeerLost
from penstock.pipeline.segment import SegmentWriter
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
