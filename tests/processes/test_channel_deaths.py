"""A channel whose peer dies, in every way that a process can die."""

import asyncio
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from anyio.abc import Process
from tests.moments import moment

from penstock import TrajectoryGroup
from penstock.channels import RemoteReceiver, connect, serve
from penstock.errors import NobodyListens, PeerLost, TooManySenders
from penstock.testing import group

SENDER = """
import os, signal, sys, anyio
from penstock import TrajectoryGroup
from penstock.channels import connect
from penstock.testing import group

async def main(url, count, end):
    async with connect(url, TrajectoryGroup, name="the child") as outbox:
        for number in range(count):
            outbox.send_nowait(group(instance_id=str(number), seed=number))
        if end == "killed at once":
            os.kill(os.getpid(), signal.SIGKILL)
        await anyio.sleep(0)
        print("sent", flush=True)
        if end == "waiting":
            await anyio.sleep_forever()
        if end == "exits":
            os._exit(3)

anyio.run(main, sys.argv[1], int(sys.argv[2]), sys.argv[3])
"""

RECEIVER = """
import sys, anyio
from penstock import TrajectoryGroup
from penstock.channels import serve

async def main():
    async with serve("shm://", TrajectoryGroup, capacity=1) as inbox:
        print(inbox.url, flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""

KINDS = ["shm://", "tcp://127.0.0.1:0"]


@asynccontextmanager
async def child(script: str, *arguments: object) -> AsyncIterator[Process]:
    process = await anyio.open_process(
        [sys.executable, "-c", script, *map(str, arguments)], stdout=subprocess.PIPE, stderr=None
    )
    async with process:
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()


async def line(process: Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.receive()).decode().strip()


@pytest.mark.parametrize("url", KINDS)
async def test_the_loss_of_a_killed_sender_is_raised_once_after_its_records(url: str) -> None:
    async with serve(url, TrajectoryGroup) as inbox, child(SENDER, inbox.url, 5, "waiting") as sender:
        assert await line(sender) == "sent"
        got = [await inbox.receive() for _ in range(5)]
        sender.send_signal(signal.SIGKILL)

        with pytest.raises(PeerLost, match=f"the child .pid {sender.pid}.*after record 5"):
            await inbox.receive()
        with pytest.raises(anyio.EndOfStream):
            await inbox.receive()
    assert [g.instance_id for g in got] == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize("end", ["killed at once", "exits"])
async def test_records_whose_descriptors_never_left_a_dead_sender_are_recovered(end: str) -> None:
    two_bundles = 8
    async with serve("shm://", TrajectoryGroup, capacity=32) as inbox, child(SENDER, inbox.url, two_bundles, end):
        got = [await inbox.receive() for _ in range(two_bundles)]
        with pytest.raises(PeerLost, match="after record 8"):
            await inbox.receive()

    for number, record in enumerate(got):
        expected = group(instance_id=str(number), seed=number)
        assert record.instance_id == str(number)
        assert {n: c.tobytes() for n, c in record.columns().items()} == {
            n: c.tobytes() for n, c in expected.columns().items()
        }


async def test_a_bundle_that_was_not_complete_is_no_record_yet() -> None:
    async with serve("shm://", TrajectoryGroup, capacity=16) as inbox, child(SENDER, inbox.url, 7, "killed at once"):
        got = [await inbox.receive() for _ in range(4)]
        with pytest.raises(PeerLost, match="after record 4"):
            await inbox.receive()
    assert [record.instance_id for record in got] == ["0", "1", "2", "3"]


async def test_records_of_a_dead_sender_stay_readable_while_they_are_held() -> None:
    async with serve("shm://", TrajectoryGroup) as inbox, child(SENDER, inbox.url, 1, "exits"):
        record = await inbox.receive()
        with pytest.raises(PeerLost):
            await inbox.receive()
    assert record.tokens.tobytes() == group(instance_id="0", seed=0).tokens.tobytes()


async def test_the_others_go_on_when_one_sender_is_killed() -> None:
    async with serve("shm://", TrajectoryGroup) as inbox:
        async with child(SENDER, inbox.url, 2, "waiting") as one, child(SENDER, inbox.url, 2, "waiting") as other:
            assert await line(one) == "sent"
            assert await line(other) == "sent"
            got = [await inbox.receive() for _ in range(4)]
            one.send_signal(signal.SIGKILL)
            with pytest.raises(PeerLost):
                await inbox.receive()
            async with connect(inbox.url, TrajectoryGroup) as outbox:
                await outbox.send(group(instance_id="after"))
                assert (await inbox.receive()).instance_id == "after"
            other.send_signal(signal.SIGKILL)
            with pytest.raises(PeerLost):
                await inbox.receive()
        with pytest.raises(anyio.EndOfStream):
            await inbox.receive()
    assert len(got) == 4


async def test_the_death_of_the_receiver_ends_a_wait_for_credit() -> None:
    async with child(RECEIVER) as receiver, connect(await line(receiver), TrajectoryGroup) as outbox:
        await outbox.send(group())
        receiver.send_signal(signal.SIGKILL)
        with pytest.raises(PeerLost, match="receiver, died"):
            await outbox.send(group())


@pytest.mark.parametrize("url", ["shm:///nowhere/at/all", "tcp://127.0.0.1:1"])
async def test_connecting_without_a_receiver_is_an_error(url: str) -> None:
    with pytest.raises(NobodyListens, match="is its process running"):
        async with connect(url, TrajectoryGroup):
            pass


async def test_a_sender_beyond_the_budget_is_refused() -> None:
    async with serve("shm://", TrajectoryGroup, max_senders=1) as inbox, connect(inbox.url, TrajectoryGroup):
        with pytest.raises(TooManySenders, match="at most 1 senders"):
            async with connect(inbox.url, TrajectoryGroup):
                pass
        assert inbox.rejected == 1


async def test_sockets_are_private_and_gone_with_their_receiver() -> None:
    async with serve("shm://", TrajectoryGroup) as inbox:
        directory = Path(inbox.url.removeprefix("shm://"))
        modes = await anyio.to_thread.run_sync(_modes, directory)
    assert modes == {".": 0o700, "control": 0o600, "data": 0o600, "owner": 0o600}
    assert not await anyio.Path(directory).exists()


@pytest.fixture
def _sockets_in_a_folder_of_their_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Any receiver of this user sweeps the common one, that of a test beside this one too."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield


@pytest.mark.usefixtures("_sockets_in_a_folder_of_their_own")
async def test_the_sockets_of_a_killed_receiver_are_swept_by_the_next() -> None:
    async with child(RECEIVER) as receiver:
        left = anyio.Path((await line(receiver)).removeprefix("shm://"))
        receiver.send_signal(signal.SIGKILL)
        await receiver.wait()
        assert await left.exists()
        async with serve("shm://", TrajectoryGroup):
            assert not await left.exists()


@pytest.mark.usefixtures("_sockets_in_a_folder_of_their_own")
async def test_the_sockets_of_a_killed_receiver_are_swept_by_a_sender_that_saw_it_die() -> None:
    async with child(RECEIVER) as receiver:
        url = await line(receiver)
        left = anyio.Path(url.removeprefix("shm://"))
        async with connect(url, TrajectoryGroup) as outbox:
            receiver.send_signal(signal.SIGKILL)
            await receiver.wait()
            while outbox.failure is None:
                await moment()
            assert await left.exists()
        assert not await left.exists()


async def test_the_sockets_of_a_killed_receiver_are_swept_by_a_sender_that_comes_too_late() -> None:
    async with child(RECEIVER) as receiver:
        url = await line(receiver)
        receiver.send_signal(signal.SIGKILL)
        await receiver.wait()
        with pytest.raises(NobodyListens):
            async with connect(url, TrajectoryGroup):
                pass
        assert not await anyio.Path(url.removeprefix("shm://")).exists()


def _modes(directory: Path) -> dict[str, int]:
    found = {path.name: path.stat().st_mode & 0o777 for path in directory.iterdir()}
    return found | {".": directory.stat().st_mode & 0o777}


async def test_a_directory_that_holds_more_than_sockets_is_nobodys_to_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much its name and its lock look like those of a dead receiver."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    kept = tmp_path / "penstock-weights"
    kept.mkdir()
    for name in "owner", "model.safetensors":
        (kept / name).touch()

    async with serve("shm://", TrajectoryGroup):
        pass

    assert [path.name async for path in anyio.Path(tmp_path).iterdir()] == ["penstock-weights"]
    assert {path.name async for path in anyio.Path(kept).iterdir()} == {"owner", "model.safetensors"}


@pytest.mark.parametrize("url", ["shm://", "tcp://127.0.0.1:0"])
@pytest.mark.parametrize("who", ["receiver", "sender"])
async def test_ctrl_c_in_the_moment_of_closing_leaves_nothing_open(url: str, who: str) -> None:
    """asyncio cancels the task then, which no shield of anyio's keeps out."""
    may_end = anyio.Event()

    async def receive(begun: asyncio.Future[RemoteReceiver[TrajectoryGroup]]) -> None:
        async with serve(url, TrajectoryGroup, name="the receiver") as inbox:
            begun.set_result(inbox)
            with suppress(PeerLost):  # an end that is disconnected while it closes may close before all is received
                await inbox.receive()
            await _cancelled_or_lost(who == "receiver", may_end)

    async def send(to: str) -> None:
        async with connect(to, TrajectoryGroup) as outbox:
            await outbox.send(group())
            await _cancelled_or_lost(who == "sender", may_end)

    before = asyncio.all_tasks()
    begun: asyncio.Future[RemoteReceiver[TrajectoryGroup]] = asyncio.get_running_loop().create_future()
    receiving = asyncio.create_task(receive(begun))
    inbox = await begun
    sending = asyncio.create_task(send(inbox.url))
    closing = receiving if who == "receiver" else sending
    with pytest.raises(asyncio.CancelledError):
        await closing
    may_end.set()
    await asyncio.wait([receiving, sending])

    assert inbox.peers.router._socket.closed
    assert asyncio.all_tasks() == before


async def _cancelled_or_lost(cancelled: bool, may_end: anyio.Event) -> None:  # noqa: FBT001
    if cancelled:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
    else:
        await may_end.wait()
