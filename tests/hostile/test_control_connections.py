"""What is said at a door is short, soon said, and said by who may: else it is refused with the reason."""

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from tests.failsafe import FAILSAFE_S

from penstock import TrajectoryGroup
from penstock._pipeline.channels import admission, shm_acceptor
from penstock._pipeline.channels import control_connection as doors
from penstock._schemas import control
from penstock.channels import RemoteReceiver, RemoteSender, connect, serve
from penstock.errors import PeerLost
from penstock.testing import group

LENGTH = struct.Struct("<I")

OWN = os.getuid()


def hello(identity: bytes = b"p" + bytes(15), *, kind: str = "group", name: str = "stranger") -> bytes:
    said = control.encode(control.Connect(control.PROTOCOL_VERSION, "shm", kind, identity, name, 1))
    return LENGTH.pack(len(said)) + said


@contextmanager
def a_stranger(inbox: RemoteReceiver[TrajectoryGroup]) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(10)
        stranger.connect(str(Path(inbox.url.removeprefix("shm://")) / "control"))
        yield stranger


def answer(stranger: socket.socket) -> control.Message:
    """The next thing that a stranger hears."""
    (length,) = LENGTH.unpack(stranger.recv(LENGTH.size, socket.MSG_WAITALL))
    return control.decode(stranger.recv(length, socket.MSG_WAITALL))


async def refused(stranger: socket.socket) -> str:
    """Why it is: the next thing that a stranger hears."""
    heard = await anyio.to_thread.run_sync(answer, stranger)
    assert isinstance(heard, control.Reject)
    return heard.reason


async def still_works(inbox: RemoteReceiver[TrajectoryGroup]) -> None:
    async with connect(inbox.url, TrajectoryGroup) as outbox:
        await outbox.send(group(instance_id="after"))
        assert (await inbox.receive()).instance_id == "after"


async def test_a_frame_that_is_too_long_is_refused_before_it_comes() -> None:
    async with serve("shm://", TrajectoryGroup) as inbox:
        with a_stranger(inbox) as stranger:
            stranger.sendall(LENGTH.pack(doors.LARGEST_FRAME + 1))
            assert "expected a control message of at most 65536 bytes, got 65537" in await refused(stranger)
        await still_works(inbox)
        assert inbox.rejected == 1


async def test_file_descriptors_that_come_with_an_unfinished_frame_are_refused_by_number() -> None:
    async with serve("shm://", TrajectoryGroup) as inbox:
        with a_stranger(inbox) as stranger:
            stranger.sendall(LENGTH.pack(doors.LARGEST_FRAME))
            for _ in range(doors.MOST_FDS + 1):
                socket.send_fds(stranger, [b"?"], [stranger.fileno()])
            assert "expected 4 file descriptors at most, got 5" in await refused(stranger)
        await still_works(inbox)
        assert inbox.rejected == 1


@pytest.mark.parametrize("said", [b"", hello(), hello()[:-1]], ids=["nothing", "hello", "half of it"])
async def test_who_says_hello_and_then_nothing_is_not_waited_for(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_acceptor, "HANDSHAKE_S", 0.05)
    async with serve("shm://", TrajectoryGroup) as inbox:
        with a_stranger(inbox) as stranger, anyio.fail_after(FAILSAFE_S):
            stranger.sendall(said)
            while not inbox.rejected:
                await anyio.lowlevel.checkpoint()
        monkeypatch.undo()
        await still_works(inbox)
        assert inbox.rejected == 1


async def test_a_sender_that_stops_during_its_handshake_is_not_rejected() -> None:
    async with serve("shm://", TrajectoryGroup) as inbox:
        acceptor = inbox._acceptor
        assert isinstance(acceptor, shm_acceptor.ShmAcceptor)
        with anyio.fail_after(FAILSAFE_S):
            with a_stranger(inbox) as stranger:
                stranger.sendall(hello())
                while not acceptor.handshakes:
                    await anyio.lowlevel.checkpoint()
            while acceptor.handshakes:
                await anyio.lowlevel.checkpoint()
        await still_works(inbox)
        assert not inbox.rejected


async def test_who_says_hello_and_then_nothing_keeps_nobody_out_meanwhile() -> None:
    async with serve("shm://", TrajectoryGroup) as inbox:
        with a_stranger(inbox) as stranger:
            stranger.sendall(hello())
            assert isinstance(await anyio.to_thread.run_sync(answer, stranger), control.Accept)
            await still_works(inbox)


async def test_what_a_stranger_says_reaches_no_log_and_no_message_unescaped(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(admission, "log", _Log(told))
    async with serve("shm://", TrajectoryGroup) as inbox:
        for said in (hello(kind="\x1b[2Jgroup\nforged"), hello(name="@@@@").replace(b"@@@@", b"\x1b[2J")):
            with a_stranger(inbox) as stranger:
                stranger.sendall(said)
                await refused(stranger)
        async with connect(inbox.url, TrajectoryGroup, name="the forger") as outbox:
            assert isinstance(outbox, RemoteSender)
            outbox._connection._socket.send(b"\x92\xa8\x1b[2JHello\x01")
            with pytest.raises(PeerLost) as lost:
                await inbox.receive()

    assert len(told) >= 3
    assert all(reason.isprintable() for reason in [*told, str(lost.value)])


class _Log:
    def __init__(self, told: list[str]) -> None:
        self._told = told

    def warning(self, _event: str, *, reason: str, **_fields: object) -> None:
        self._told.append(reason)


async def test_who_comes_under_the_name_of_another_is_refused() -> None:
    async with serve("shm://", TrajectoryGroup) as inbox, connect(inbox.url, TrajectoryGroup) as outbox:
        [identity] = inbox.peers
        with a_stranger(inbox) as stranger:
            stranger.sendall(hello(identity))
            assert await refused(stranger) == "the identity is in use"
        await outbox.send(group(instance_id="0"))
        assert (await inbox.receive()).instance_id == "0"
        assert inbox.rejected == 1


async def test_a_process_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve("shm://", TrajectoryGroup) as inbox:
        with a_stranger(inbox) as stranger:
            monkeypatch.setattr(os, "getuid", lambda: OWN + 1)
            stranger.sendall(hello())
            assert await refused(stranger) == "expected a process of the same user"
        monkeypatch.undo()
        await still_works(inbox)
        assert inbox.rejected == 1
