"""A handshake on a control connection is short, in time and by a permitted user; otherwise it is rejected."""

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from structlog.testing import capture_logs
from tests import wire
from tests.failsafe import FAILSAFE_S
from tests.fixed_limits import set_limits
from tests.moments import moment

from penstock import TrajectoryGroup
from penstock.channels import RemoteReceiver, RemoteSender, connect, serve
from penstock.errors import PeerLost
from penstock.testing import group

LENGTH = struct.Struct("<I")

OWN = os.getuid()


LARGEST_FRAME = 65536

MOST_FDS = 4


def connect_frame(**changes: Any) -> bytes:
    return wire.frame(wire.connect_message(**changes))


@contextmanager
def stranger_at(inbox: RemoteReceiver[TrajectoryGroup]) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(FAILSAFE_S)
        stranger.connect(str(Path(inbox.url.removeprefix("shm://")) / "control"))
        yield stranger


def answer(stranger: socket.socket) -> tuple[str, Any]:
    """Receive the next message: its type by name, and the message."""
    (length,) = LENGTH.unpack(stranger.recv(LENGTH.size, socket.MSG_WAITALL))
    return wire.decode(stranger.recv(length, socket.MSG_WAITALL))


async def rejection(stranger: socket.socket) -> str:
    """Receive the next message, a rejection, and return its reason."""
    kind, message = await anyio.to_thread.run_sync(answer, stranger)
    assert kind == "Reject"
    return str(message.reason)


async def still_works(inbox: RemoteReceiver[TrajectoryGroup]) -> None:
    async with connect(inbox.url, TrajectoryGroup) as outbox:
        await outbox.send(group(instance_id="after"))
        assert (await inbox.receive()).instance_id == "after"


async def test_a_frame_that_is_too_long_is_rejected_before_it_is_received() -> None:
    async with serve("shm://", TrajectoryGroup) as inbox:
        with stranger_at(inbox) as stranger:
            stranger.sendall(LENGTH.pack(LARGEST_FRAME + 1))
            assert "expected a control message of at most 65536 bytes, got 65537" in await rejection(stranger)
        await still_works(inbox)
        assert inbox.rejected == 1


async def test_too_many_file_descriptors_with_an_unfinished_frame_are_rejected() -> None:
    async with serve("shm://", TrajectoryGroup) as inbox:
        with stranger_at(inbox) as stranger:
            stranger.sendall(LENGTH.pack(LARGEST_FRAME))
            for _ in range(MOST_FDS + 1):
                socket.send_fds(stranger, [b"?"], [stranger.fileno()])
            assert "expected 4 file descriptors at most, got 5" in await rejection(stranger)
        await still_works(inbox)
        assert inbox.rejected == 1


@pytest.mark.parametrize("sent", [b"", connect_frame(), connect_frame()[:-1]], ids=["nothing", "a frame", "a part"])
async def test_an_unfinished_handshake_ends_after_its_timeout(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, HANDSHAKE_S=0.05)
    async with serve("shm://", TrajectoryGroup) as inbox:
        with stranger_at(inbox) as stranger, anyio.fail_after(FAILSAFE_S):
            stranger.sendall(sent)
            while not inbox.rejected:
                await moment()
        monkeypatch.undo()
        await still_works(inbox)
        assert inbox.rejected == 1


async def test_a_sender_that_stops_during_its_handshake_is_not_rejected() -> None:
    async with serve("shm://", TrajectoryGroup) as inbox:
        with anyio.fail_after(FAILSAFE_S):
            with stranger_at(inbox) as stranger:
                stranger.sendall(connect_frame())
                while not inbox.peers.attendance.granted:
                    await moment()
            while inbox.peers.attendance.granted:
                await moment()
        await still_works(inbox)
        assert not inbox.rejected


async def test_an_unfinished_handshake_delays_no_other_sender() -> None:
    async with serve("shm://", TrajectoryGroup) as inbox:
        with stranger_at(inbox) as stranger:
            stranger.sendall(connect_frame())
            kind, _ = await anyio.to_thread.run_sync(answer, stranger)
            assert kind == "Accept"
            await still_works(inbox)


async def test_text_of_a_stranger_is_escaped_in_logs_and_messages() -> None:
    unprintable = [
        connect_frame(kind="\x1b[2Jgroup\nforged"),
        connect_frame(name="@@@@").replace(b"@@@@", b"\x1b[2J"),
    ]
    with capture_logs() as logs:
        async with serve("shm://", TrajectoryGroup) as inbox:
            for sent in unprintable:
                with stranger_at(inbox) as stranger:
                    stranger.sendall(sent)
                    await rejection(stranger)
            async with connect(inbox.url, TrajectoryGroup, name="the forger") as outbox:
                assert isinstance(outbox, RemoteSender)
                outbox._connection._socket.send(b"\x92\xa8\x1b[2JHello\x01")
                with pytest.raises(PeerLost) as lost:
                    await inbox.receive()

    reasons = [entry["reason"] for entry in logs if "reason" in entry]
    assert len(reasons) >= 3
    assert all(reason.isprintable() for reason in [*reasons, str(lost.value)])


async def test_a_sender_with_the_identity_of_another_is_rejected() -> None:
    async with serve("shm://", TrajectoryGroup) as inbox, connect(inbox.url, TrajectoryGroup) as outbox:
        [identity] = inbox.peers.admitted
        with stranger_at(inbox) as stranger:
            stranger.sendall(connect_frame(identity=identity))
            assert await rejection(stranger) == "the identity is in use"
        await outbox.send(group(instance_id="0"))
        assert (await inbox.receive()).instance_id == "0"
        assert inbox.rejected == 1


async def test_a_process_of_another_user_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve("shm://", TrajectoryGroup) as inbox:
        with stranger_at(inbox) as stranger:
            monkeypatch.setattr(os, "getuid", lambda: OWN + 1)
            stranger.sendall(connect_frame())
            assert await rejection(stranger) == "expected a process of the same user"
        monkeypatch.undo()
        await still_works(inbox)
        assert inbox.rejected == 1
