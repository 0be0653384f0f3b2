"""Many strangers connect: memory and file descriptors stay bounded, and other senders continue."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
import zmq
from structlog.testing import capture_logs
from tests.failsafe import FAILSAFE_S
from tests.fixed_limits import set_limits
from tests.moments import moment

from penstock import TrajectoryGroup
from penstock.channels import RemoteReceiver, connect, serve
from penstock.testing import group

Inbox = RemoteReceiver[TrajectoryGroup]


def control_socket_of(url: str) -> str:
    return str(Path(url.removeprefix("shm://")) / "control")


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def still_works(inbox: Inbox) -> None:
    async with connect(inbox.url, TrajectoryGroup) as outbox:
        await outbox.send(group(instance_id="after"))
        assert (await inbox.receive()).instance_id == "after"


async def until_rejected(inbox: Inbox, count: int) -> None:
    with anyio.fail_after(FAILSAFE_S):
        while inbox.rejected < count:
            await moment()


@contextmanager
def a_stranger(inbox: Inbox) -> Iterator[zmq.Socket[bytes]]:
    stranger: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    stranger.setsockopt(zmq.SNDHWM, 0)
    stranger.connect(f"ipc://{inbox.url.removeprefix('shm://')}/data")
    try:
        yield stranger
    finally:
        stranger.close(linger=0)


async def test_a_flood_of_messages_is_counted_and_a_sender_gets_its_turn_in_between() -> None:
    flood = 50_000
    with capture_logs() as logs:
        async with serve("shm://", TrajectoryGroup) as inbox:
            with a_stranger(inbox) as stranger:
                for _ in range(flood):
                    stranger.send(b"\xc1")
                await still_works(inbox)
                await until_rejected(inbox, flood)
            assert inbox.rejected == flood
    assert len(logs) < 40


async def test_other_tasks_run_while_messages_pour_in(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, AT_ONCE=(10, 2**20))
    async with serve("shm://", TrajectoryGroup) as inbox:
        with a_stranger(inbox) as stranger:
            for _ in range(200):
                stranger.send(b"\xc1")
            await until_rejected(inbox, 1)
            assert inbox.rejected < 200  # as messages are drained, this task runs
            await until_rejected(inbox, 200)


async def test_the_end_of_a_connection_is_handled_while_messages_pour_in(monkeypatch: pytest.MonkeyPatch) -> None:
    flood = 50_000
    set_limits(monkeypatch, AT_ONCE=(10, 2**20))
    async with serve("shm://", TrajectoryGroup) as inbox:
        with a_stranger(inbox) as stranger:
            for _ in range(flood):
                stranger.send(b"\xc1")
            await still_works(inbox)
            with anyio.fail_after(FAILSAFE_S):
                while inbox.peers:
                    await moment()
            assert inbox.rejected < flood


async def test_a_frame_that_no_sender_would_send_is_not_taken_in() -> None:
    async with serve("shm://", TrajectoryGroup) as inbox:
        with a_stranger(inbox) as stranger:
            stranger.send(bytes(65 * 2**20))
            stranger.send(b"\xc1")
            await until_rejected(inbox, 1)  # ZeroMQ closed the stranger's connection, which reconnected with the rest
            await still_works(inbox)
        assert inbox.rejected == 1


async def test_silent_connections_keep_no_sender_out_and_the_oldest_of_too_many_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_limits(monkeypatch, HANDSHAKE_S=FAILSAFE_S)  # they are closed for their number
    async with serve("shm://", TrajectoryGroup, max_senders=1) as inbox:
        with ExitStack() as strangers:
            silent = [strangers.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(67)]
            for one in silent:
                one.connect(control_socket_of(inbox.url))
                one.setblocking(False)

            await until_rejected(inbox, 2)  # 64 beyond the senders may be under way
            for oldest in silent[:2]:
                await anyio.wait_readable(oldest)
                assert b"too many connections" in oldest.recv(2**10)
            with pytest.raises(BlockingIOError):
                silent[2].recv(1)

            await still_works(inbox)


async def test_unrequested_file_descriptors_are_closed() -> None:
    async with serve("shm://", TrajectoryGroup) as inbox:
        before = open_descriptors()
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(control_socket_of(inbox.url))
            while not inbox.rejected:
                with suppress(OSError):  # it was hung up on
                    socket.send_fds(stranger, [b"\x00"], [stranger.fileno()])
                await anyio.lowlevel.checkpoint()
        await still_works(inbox)
        with anyio.fail_after(FAILSAFE_S):
            while open_descriptors() > before:
                await moment()


FEW_DESCRIPTORS = """
import os, resource, anyio
from penstock import TrajectoryGroup
from penstock.channels import connect, serve
from penstock.testing import group

async def main():
    async with serve("shm://", TrajectoryGroup) as inbox:
        soft = len(os.listdir("/proc/self/fd")) + 6
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft))
        print(inbox.url, flush=True)
        await anyio.to_thread.run_sync(input)  # the strangers have come
        while not inbox.rejected:
            await anyio.sleep(0)
        print("rejected", flush=True)
        await anyio.to_thread.run_sync(input)  # and gone
        print((await inbox.receive()).instance_id, flush=True)

anyio.run(main)
"""


def test_a_receiver_without_a_file_descriptor_left_lets_senders_in_again_when_it_has_some() -> None:
    command = [sys.executable, "-c", FEW_DESCRIPTORS]
    with (
        ExitStack() as strangers,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as receiver,
    ):
        assert receiver.stdin is not None
        assert receiver.stdout is not None
        url = receiver.stdout.readline().strip()
        for _ in range(12):
            strangers.enter_context(socket.socket(socket.AF_UNIX)).connect(control_socket_of(url))
        print(file=receiver.stdin, flush=True)
        assert any("rejected" in line for line in receiver.stdout)
        strangers.close()
        print(file=receiver.stdin, flush=True)
        anyio.run(_send_one, url)
        assert any("after" in line for line in receiver.stdout)


async def _send_one(url: str) -> None:
    async with connect(url, TrajectoryGroup) as outbox:
        await outbox.send(group(instance_id="after"))
