"""Channels use a ZeroMQ context of their own, one in each process, apart from that of the user's code, and close its
sockets in an order that it survives.
"""

from __future__ import annotations

import subprocess
import sys

import anyio
import anyio.abc
import anyio.lowlevel
import anyio.to_thread
import pytest
import zmq
from tests.failsafe import FAILSAFE_S

from penstock import TrajectoryGroup
from penstock.channels import connect, serve
from penstock.errors import PeerClosed
from penstock.testing import group

SEND = """
import os
import anyio
from penstock import TrajectoryGroup
from penstock.channels import connect, serve
from penstock.testing import group

async def send():
    async with serve("shm://", TrajectoryGroup) as inbox, connect(inbox.url, TrajectoryGroup) as outbox:
        await outbox.send(group(instance_id="sent"))
        assert (await inbox.receive()).instance_id == "sent"

anyio.run(send)
"""

FORKED = f"""{SEND}
if child := os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
anyio.run(send)
"""

COUNTED = f"""{SEND}
anyio.run(send)
names = []
for thread in os.listdir("/proc/self/task"):
    try:
        with open(f"/proc/self/task/{{thread}}/comm") as file:
            names.append(file.read())
    except FileNotFoundError:  # it has just ended
        pass
assert sum(name.startswith("ZMQbg/IO") for name in names) == 1, names
"""


def run(script: str) -> tuple[int, str]:
    """Run a script with all warnings but those of deprecation; return its exit status and what it wrote to stderr."""
    warnings = ["-W", "always", "-W", "ignore::DeprecationWarning"]
    ran = subprocess.run(
        [sys.executable, *warnings, "-c", script], capture_output=True, check=False, text=True, timeout=FAILSAFE_S
    )
    return ran.returncode, ran.stderr


def test_all_channels_of_a_process_share_one_context() -> None:
    assert run(COUNTED) == (0, "")


async def test_a_channel_works_while_the_users_own_code_terminates_its_context() -> None:
    async with serve("shm://", TrajectoryGroup) as inbox, connect(inbox.url, TrajectoryGroup) as outbox:
        await anyio.to_thread.run_sync(zmq.Context.instance().term)
        await outbox.send(group(instance_id="sent"))

        assert (await inbox.receive()).instance_id == "sent"


def test_a_forked_process_makes_a_context_of_its_own_and_exits_without_a_warning() -> None:
    assert run(FORKED) == (0, "")


@pytest.fixture
def connected_when_closed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return, for each sender's socket that is closed from now on, whether it had a connection then."""
    connected: list[bool] = []
    close = zmq.Socket.close

    def closing(socket: zmq.Socket[bytes], linger: int | None = None) -> None:
        if not socket.closed and socket.getsockopt(zmq.TYPE) == zmq.DEALER:
            connected.append(bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT))
        close(socket, linger)

    monkeypatch.setattr(zmq.Socket, "close", closing)
    return connected


class TestASocketOfASenderOverTcpIsClosedAfterItsConnection:
    """Else ZeroMQ aborts the process now and then: a message of several frames was half on its way to a peer that ended
    in the same moment.
    """

    LARGE = group(completion_lengths=[200_000] * 4)

    async def test_when_it_is_done(self, connected_when_closed: list[bool]) -> None:
        async with serve("tcp://127.0.0.1:0", TrajectoryGroup) as inbox:
            async with connect(inbox.url, TrajectoryGroup) as outbox:
                await outbox.send(self.LARGE)
            await inbox.receive()

        assert connected_when_closed == [False]

    @pytest.mark.parametrize("ended", ["by an exception", "by a cancellation"])
    async def test_when_it_ends_in_the_middle(self, ended: str, connected_when_closed: list[bool]) -> None:
        async def send(task_status: anyio.abc.TaskStatus[None]) -> None:
            async with connect(inbox.url, TrajectoryGroup) as outbox:
                outbox.send_nowait(self.LARGE)
                task_status.started()
                await anyio.lowlevel.checkpoint()
                if ended == "by an exception":
                    raise ZeroDivisionError
                await anyio.sleep_forever()

        async with serve("tcp://127.0.0.1:0", TrajectoryGroup) as inbox:
            with pytest.RaisesGroup(ZeroDivisionError) if ended == "by an exception" else anyio.CancelScope():
                async with anyio.create_task_group() as tasks:
                    await tasks.start(send)
                    if ended == "by a cancellation":
                        await anyio.lowlevel.checkpoint()
                        tasks.cancel_scope.cancel()

        assert connected_when_closed == [False]

    async def test_when_the_receiver_closes_first(self, connected_when_closed: list[bool]) -> None:
        async def send_until_it_closes() -> None:
            async with connect(inbox.url, TrajectoryGroup) as outbox:
                connected.set()
                while True:
                    await outbox.send(self.LARGE)

        async def send() -> None:
            with pytest.raises(PeerClosed):
                await send_until_it_closes()

        connected = anyio.Event()
        async with anyio.create_task_group() as tasks, serve("tcp://127.0.0.1:0", TrajectoryGroup) as inbox:
            tasks.start_soon(send)
            await connected.wait()

        assert connected_when_closed == [False]
