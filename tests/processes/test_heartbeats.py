"""A channel whose peer is stopped by a signal: its sockets stay open, and it sends no heartbeats."""

from __future__ import annotations

import os
import signal
import socket as sockets
from contextlib import ExitStack, suppress
from pathlib import Path
from subprocess import Popen

import anyio
import anyio.to_thread
import pytest
from structlog.testing import capture_logs
from tests.failsafe import FAILSAFE_S
from tests.fixed_limits import set_limits
from tests.processes.children import child, line
from tests.processes.worker_sinks import Commit
from tests.processes.worker_stages import Judge, Sample, SampleAndDie

from penstock import ReceiveChannel, SendChannel, TrajectoryGroup, processes, source
from penstock.channels import connect, serve
from penstock.errors import NobodyListens, PeerLost
from penstock.testing import group

TIMEOUT_S = 3.0
"""Longer than a process waits for a core on a busy machine."""

KINDS = ["shm://", "tcp://127.0.0.1:0"]

SENDERS = ["shm://", pytest.param("tcp://127.0.0.1:0", marks=pytest.mark.long)]
RECEIVERS = [pytest.param("shm://", marks=pytest.mark.long), "tcp://127.0.0.1:0"]
"""The heartbeats of both transports are ZeroMQ's: each is stopped at one end in `make test`."""

SENDER = """
    import ctypes, sys, anyio
    from penstock import TrajectoryGroup
    from penstock.channels import connect
    from penstock.errors import PeerClosed
    from penstock.testing import group

    async def main(url, busy_ms):
        try:
            async with connect(url, TrajectoryGroup, name="the sender") as outbox:
                await outbox.send(group(instance_id="0"))
                await anyio.sleep(0)
                print("sent", flush=True)
                ctypes.PyDLL(None).usleep(1000 * busy_ms)  # holds the interpreter lock
                for number in range(1, 100):
                    await outbox.send(group(instance_id=str(number)))
        except PeerClosed as error:
            print(error, flush=True)

    anyio.run(main, sys.argv[1], int(sys.argv[2]))
"""

RECEIVER = """
    import ctypes, sys, anyio
    from penstock import TrajectoryGroup
    from penstock.channels import serve

    async def main(url, busy_ms):
        async with serve(url, TrajectoryGroup, capacity=2, name="the receiver") as inbox:
            print(inbox.url, flush=True)
            await inbox.receive()
            print("received", flush=True)
            ctypes.PyDLL(None).usleep(1000 * busy_ms)
            async for _ in inbox:
                pass

    anyio.run(main, sys.argv[1], int(sys.argv[2]))
"""


def stop(process: Popen[str]) -> None:
    """Stop a process by a signal, and wait until the kernel reports it."""
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


async def status(process: Popen[str]) -> int:
    """Return the exit status of a process; the event loop runs on meanwhile."""
    return await anyio.to_thread.run_sync(process.wait, FAILSAFE_S)


async def receive_into(received: list[int], inbox: ReceiveChannel[TrajectoryGroup]) -> None:
    """Receive until that fails, and add the number of each record to `received`."""
    while True:
        received.append(int((await inbox.receive()).instance_id))


async def send_into(outbox: SendChannel[TrajectoryGroup]) -> None:
    """Send until that fails."""
    while True:
        await outbox.send(group())


@pytest.mark.parametrize("url", SENDERS)
async def test_a_stopped_sender_is_lost_in_time_and_changes_nothing_when_it_continues(url: str) -> None:
    async with serve(url, TrajectoryGroup, capacity=4, heartbeat_timeout_s=TIMEOUT_S) as inbox:
        with child(SENDER, inbox.url, "0") as sender:
            assert await line(sender) == "sent"

            stop(sender)
            received = list[int]()
            with pytest.raises(PeerLost, match=rf"the sender .pid \d+. did not respond for {TIMEOUT_S} s"):
                await receive_into(received, inbox)

            assert received == list(range(len(received)))
            sender.send_signal(signal.SIGCONT)
            assert "disconnected this sender: the sender" in await line(sender)
            with pytest.raises(anyio.EndOfStream):
                await inbox.receive()


@pytest.mark.parametrize("url", RECEIVERS)
async def test_a_stopped_receiver_is_lost_in_time_and_fails_when_it_continues(url: str) -> None:
    with child(RECEIVER, url, "0") as receiver:
        async with connect(await line(receiver), TrajectoryGroup, heartbeat_timeout_s=TIMEOUT_S) as outbox:
            await outbox.send(group())
            assert await line(receiver) == "received"

            stop(receiver)
            with pytest.raises(
                PeerLost, match=rf"the receiver, did not respond for {TIMEOUT_S} s, because its process was stopped"
            ):
                await send_into(outbox)
        receiver.send_signal(signal.SIGCONT)
        assert await status(receiver) == 1  # PeerLost: its sender closed the connection without Close


async def test_a_peer_that_is_busy_for_longer_than_the_timeout_is_not_lost() -> None:
    here, there = KINDS
    busy_ms = str(int(1000 * 2 * TIMEOUT_S))
    async with serve(here, TrajectoryGroup, capacity=2, heartbeat_timeout_s=TIMEOUT_S) as inbox:
        with child(SENDER, inbox.url, busy_ms) as sender, child(RECEIVER, there, busy_ms) as receiver:
            async with connect(await line(receiver), TrajectoryGroup, heartbeat_timeout_s=TIMEOUT_S) as outbox:
                assert await line(sender) == "sent"

                for _ in range(100):
                    await outbox.send(await inbox.receive())
                assert outbox.failure is None

            assert await status(receiver) == await status(sender) == 0


async def test_a_receiver_that_does_not_answer_a_handshake_is_not_waited_for() -> None:
    with child(RECEIVER, "shm://", "0") as receiver:
        url = await line(receiver)
        stop(receiver)

        with pytest.raises(NobodyListens, match=r"to answer, got no answer for 0\.05 s: is its process stopped"):
            async with connect(url, TrajectoryGroup, heartbeat_timeout_s=0.05):
                pass


@pytest.mark.parametrize("family", [sockets.AF_UNIX, sockets.AF_INET])
async def test_nor_is_one_whose_queue_of_connections_is_full(family: int, tmp_path: Path) -> None:
    """The queue is full after many connections to a stopped process."""
    with ExitStack() as stack:
        control_connection = stack.enter_context(sockets.socket(family))
        control_connection.bind(str(tmp_path / "control") if family == sockets.AF_UNIX else ("127.0.0.1", 0))
        control_connection.listen(0)
        for _ in range(3):
            before = stack.enter_context(sockets.socket(family))
            before.setblocking(False)
            with suppress(BlockingIOError):
                before.connect(control_connection.getsockname())
        url = (
            f"shm://{tmp_path}"
            if family == sockets.AF_UNIX
            else f"tcp://127.0.0.1:{control_connection.getsockname()[1]}"
        )

        with pytest.raises(NobodyListens, match=r"to answer, got no answer for 0\.05 s: is its process stopped"):
            async with connect(url, TrajectoryGroup, heartbeat_timeout_s=0.05):
                pass


async def test_without_a_heartbeat_timeout_a_stopped_sender_is_waited_for() -> None:
    async with serve("shm://", TrajectoryGroup, capacity=4, heartbeat_timeout_s=None) as inbox:
        with child(SENDER, inbox.url, "0") as sender:
            assert await line(sender) == "sent"
            stop(sender)
            with anyio.move_on_after(0.5):
                await receive_into([], inbox)

            sender.send_signal(signal.SIGCONT)

            async for _ in inbox:
                pass
            assert inbox.statistics().received == 100


SOURCE = SampleAndDie(20, signal=signal.SIGSTOP)
MIDDLE = Judge(dies_once=True, signal=signal.SIGSTOP)

STOPPED = {
    "SampleAndDie 1/2": source(SOURCE, on=processes(2)),
    "Judge 1/1": source(Sample(20)).then(MIDDLE, on=processes(1), capacity=2),
}


@pytest.mark.parametrize("name", [pytest.param("SampleAndDie 1/2", marks=pytest.mark.long), "Judge 1/1"])
async def test_a_stopped_worker_is_killed_and_replaced_and_named_with_the_reason(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, WORKER_HEARTBEAT_TIMEOUT_S=TIMEOUT_S)

    with capture_logs() as log:
        report = await STOPPED[name].sink(Commit()).run()

    balance, stage = report.balance, report.statistics.stages[-2]
    assert stage.workers[0].restarts == 1
    assert report.stop_reason == "end of stream"
    assert balance.balanced
    (how,) = [entry["how"] for entry in log if entry["event"] == "worker_died"]
    assert how.startswith(f"{name} (pid ")
    assert how.endswith(
        f"did not respond for {TIMEOUT_S} s, because its process was stopped or its host hung; it was killed"
    )
    assert set(balance.reasons["lost"]) == (
        {how} if name.startswith("Judge") else set()
    )  # a source has sent it, or not
