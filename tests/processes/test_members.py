"""Senders that are counted by name: killed, restarted and doubled in real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from anyio.abc import Process
from tests.failsafe import FAILSAFE_S
from tests.loop_clock import LoopClock

from penstock import Batcher, GroupId, Pipeline, SinkTrainer, SourceChannel, TrainBatch, TrajectoryGroup, source
from penstock.channels import RemoteReceiver, ReplayingSender, connect, connect_with_replay, serve
from penstock.errors import (
    MemberAbsent,
    MemberNameInUse,
    MemberNameRequired,
    NobodyListens,
    PeerClosed,
    PeerLost,
    StageFailed,
    TooManyMembers,
)
from penstock.testing import group
from penstock.training import write_checkpoint

MEMBER = """
import sys, anyio
from penstock import TrajectoryGroup
from penstock.channels import connect
from penstock.testing import group

async def main(url, name, first, count, end):
    async with connect(url, TrajectoryGroup, name=name) as outbox:
        for number in range(first, first + count):
            await outbox.send(group(env=name, instance_id=str(number)))
        await anyio.sleep(0)
        print("sent", flush=True)
        if end == "stays":
            await anyio.sleep_forever()

anyio.run(main, sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
"""

KINDS = ["shm://", "tcp://127.0.0.1:0"]

WITH_PROCESSES = ["shm://", pytest.param("tcp://127.0.0.1:0", marks=pytest.mark.long)]
"""Members are counted alike over either; those in processes of their own are killed over one in `make test`."""


@asynccontextmanager
async def member(url: str, name: str, first: int, count: int, end: str) -> AsyncIterator[Process]:
    """Start a sender in a process of its own, which has sent its records."""
    command = [sys.executable, "-c", MEMBER, url, name, str(first), str(count), end]
    async with await anyio.open_process(command, stdout=subprocess.PIPE, stderr=None) as process:
        try:
            assert process.stdout is not None
            assert (await process.stdout.receive()).strip() == b"sent"
            yield process
        finally:
            if process.returncode is None:
                process.kill()


async def killed(url: str, name: str, first: int, count: int, inbox: RemoteReceiver[TrajectoryGroup]) -> list[str]:
    """Run a member until its records are received, kill it, and return the records."""
    async with member(url, name, first, count, "stays") as process:
        got = [(await inbox.receive()).instance_id for _ in range(count)]
        process.send_signal(signal.SIGKILL)
        await process.wait()
    return got


async def lost(inbox: RemoteReceiver[TrajectoryGroup]) -> None:
    """Return when no member is connected any more."""
    while inbox.statistics().senders:  # noqa: ASYNC110 (the end of a process is no event here)
        await anyio.sleep(0.01)


async def receive(inbox: RemoteReceiver[TrajectoryGroup]) -> None:
    await inbox.receive()


async def iterate(inbox: RemoteReceiver[TrajectoryGroup]) -> None:
    async for _ in inbox:
        pass


@pytest.mark.parametrize("url", WITH_PROCESSES)
async def test_one_member_that_is_killed_again_and_again_uses_up_no_other(url: str) -> None:
    async with serve(url, TrajectoryGroup, senders=2) as inbox:
        for life in range(3):
            assert await killed(inbox.url, "a", life, 1, inbox) == [str(life)]
        async with member(inbox.url, "a", 3, 1, "done"), member(inbox.url, "b", 0, 2, "done"):
            rest = [(record.env, record.instance_id) async for record in inbox]

    assert sorted(rest) == [("a", "3"), ("b", "0"), ("b", "1")]


async def test_a_member_that_is_restarted_at_once_is_not_taken_for_a_second_one() -> None:
    """Its end and its return arrive together, as they do at a receiver that is busy."""
    async with serve("tcp://127.0.0.1:0", TrajectoryGroup, senders=1) as inbox:
        command = [sys.executable, "-c", MEMBER, inbox.url, "a"]
        with subprocess.Popen([*command, "0", "1", "stays"], stdout=subprocess.DEVNULL) as killed:  # noqa: ASYNC220
            await inbox.receive()
            killed.kill()
            killed.wait()
        with subprocess.Popen([*command, "1", "1", "done"], stdout=subprocess.DEVNULL) as restarted:  # noqa: ASYNC220
            assert inbox.peers.router._socket.poll(int(FAILSAFE_S * 1000))
            assert await anyio.to_thread.run_sync(restarted.wait) == 0
            assert [record.instance_id async for record in inbox] == ["1"]


@pytest.mark.parametrize(
    ("url", "how"),
    [
        ("shm://", receive),
        ("tcp://127.0.0.1:0", iterate),
        pytest.param("shm://", iterate, marks=pytest.mark.long),
        pytest.param("tcp://127.0.0.1:0", receive, marks=pytest.mark.long),
    ],
)
async def test_a_killed_member_that_stays_away_fails_the_stream_by_name(
    url: str, how: Callable[[RemoteReceiver[TrajectoryGroup]], Awaitable[object]]
) -> None:
    async with serve(url, TrajectoryGroup, senders=1) as inbox:
        await killed(inbox.url, "the member", 0, 2, inbox)
        await lost(inbox)
        LoopClock().set_forward(600)

        with pytest.raises(MemberAbsent, match=r"'the member' to come back within 600 s.*after record 2"):
            await how(inbox)
        with pytest.raises(MemberAbsent):  # it never passes for an end of the stream
            await inbox.receive()


@pytest.mark.parametrize("url", WITH_PROCESSES)
async def test_the_stream_goes_on_without_a_killed_member_where_that_was_chosen(url: str) -> None:
    async with serve(url, TrajectoryGroup, senders=2, on_absence="continue") as inbox:
        await killed(inbox.url, "a", 0, 1, inbox)
        await lost(inbox)
        async with member(inbox.url, "b", 0, 2, "done"):
            LoopClock().set_forward(600)
            assert [record.env async for record in inbox] == ["b", "b"]


@pytest.mark.parametrize("url", KINDS)
async def test_a_second_live_connection_under_a_name_is_refused_and_the_first_goes_on(url: str) -> None:
    async with serve(url, TrajectoryGroup, senders=1) as inbox:
        async with connect(inbox.url, TrajectoryGroup, name="a") as outbox:
            with pytest.raises(MemberNameInUse, match="give every sender a name of its own"):
                async with connect(inbox.url, TrajectoryGroup, name="a"):
                    pass
            await outbox.send(group(instance_id="first"))
        assert [record.instance_id async for record in inbox] == ["first"]


@pytest.mark.parametrize("url", KINDS)
async def test_a_member_that_was_done_and_comes_again_is_awaited_again(url: str) -> None:
    async with serve(url, TrajectoryGroup, senders=2) as inbox:
        for instance_id in "01":
            async with connect(inbox.url, TrajectoryGroup, name="a") as outbox:
                await outbox.send(group(instance_id=instance_id))
        async with connect(inbox.url, TrajectoryGroup, name="a") as again:
            async with connect(inbox.url, TrajectoryGroup, name="b"):
                pass
            assert [(await inbox.receive()).instance_id for _ in "01"] == ["0", "1"]
            with pytest.raises(anyio.WouldBlock):
                inbox.receive_nowait()
            await again.send(group(instance_id="2"))
        assert [record.instance_id async for record in inbox] == ["2"]


@pytest.mark.parametrize("url", KINDS)
async def test_a_member_that_comes_after_the_end_is_refused_for_nothing_it_sends_would_be_received(url: str) -> None:
    async with serve(url, TrajectoryGroup, senders=1) as inbox:
        async with connect(inbox.url, TrajectoryGroup, name="a"):
            pass
        with pytest.raises(anyio.EndOfStream):
            await inbox.receive()
        with pytest.raises(PeerClosed, match="every member is done"):
            async with connect(inbox.url, TrajectoryGroup, name="a"):
                pass


@pytest.mark.parametrize("url", KINDS)
async def test_a_sender_without_a_name_or_with_one_too_many_is_refused(url: str) -> None:
    async with serve(url, TrajectoryGroup, senders=1) as inbox:
        with pytest.raises(MemberNameRequired, match="give connect or connect_with_replay name="):
            async with connect(inbox.url, TrajectoryGroup):
                pass
        async with connect(inbox.url, TrajectoryGroup, name="a"):
            with pytest.raises(TooManyMembers, match=r"expected 1 members, which are 'a', got another one, 'b'"):
                async with connect(inbox.url, TrajectoryGroup, name="b"):
                    pass
        assert inbox.rejected == 2


async def test_a_replaying_sender_that_is_no_member_fails_at_once() -> None:
    async with serve("shm://", TrajectoryGroup, senders=1) as inbox:
        with pytest.raises(MemberNameRequired):
            async with connect_with_replay(inbox.url) as outbox:
                await outbox.send(group())


LASTING_MEMBER = """
import sys, anyio, pathlib
from penstock.channels import connect_with_replay
from penstock.testing import group

async def main(address, name, count, end):
    async with connect_with_replay(address, name=name) as outbox:
        for number in range(count):
            await outbox.send(group(env=name, instance_id=str(number), completion_lengths=[2, 2]))
        await anyio.sleep(0)
        print("sent", flush=True)
        if end == "stays":
            await anyio.sleep_forever()

anyio.run(main, pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
"""


class Trainer:
    """Records the trained prompts; its checkpoint contains the committed ones."""

    def __init__(self) -> None:
        self.trained: Counter[GroupId] = Counter()
        self.steps = 0
        self.committed: Mapping[GroupId, int] = {}

    def step(self, batch: TrainBatch) -> dict[str, float]:
        self.trained.update(packed.id for packed in batch.groups)
        self.steps += 1
        return {}

    def save(self, folder: Path, committed: Mapping[GroupId, int]) -> Path:
        del committed
        return write_checkpoint(folder, self.steps, lambda _: None)


@asynccontextmanager
async def lasting_member(address: Path, name: str, count: int, end: str) -> AsyncIterator[Process]:
    """Start a replaying sender in a process of its own, which has sent its records."""
    command = [sys.executable, "-c", LASTING_MEMBER, str(address), name, str(count), end]
    async with await anyio.open_process(command, stdout=subprocess.PIPE, stderr=None) as process:
        try:
            assert process.stdout is not None
            assert (await process.stdout.receive()).strip() == b"sent"
            yield process
            await process.wait()
        finally:
            if process.returncode is None:
                process.kill()


def training(folder: Path, trainer: Trainer, channel: SourceChannel, max_tokens: int = 16) -> Pipeline:
    return (
        source(channel)
        .then(Batcher(max_tokens=max_tokens))
        .sink(SinkTrainer(trainer, checkpoints=folder / "checkpoints", checkpoint_every=2))
    )


@pytest.mark.parametrize("url", WITH_PROCESSES)
async def test_a_member_that_is_restarted_with_records_unsaved_has_everything_trained_once(
    url: str, tmp_path: Path
) -> None:
    trainer, address = Trainer(), tmp_path / "address"
    pipeline = training(tmp_path, trainer, SourceChannel(url, address=address, senders=2))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pipeline.run)
        async with lasting_member(address, "a", 5, "stays") as unlucky:
            unlucky.send_signal(signal.SIGKILL)
        async with lasting_member(address, "a", 7, "done") as again, lasting_member(address, "b", 5, "done") as other:
            ended = [await process.wait() for process in (again, other)]
            assert ended == [0, 0]

    assert trainer.trained == Counter(
        [GroupId("a", str(n)) for n in range(7)] + [GroupId("b", str(n)) for n in range(5)]
    )


@pytest.mark.parametrize("url", WITH_PROCESSES)
async def test_a_run_whose_killed_member_stays_absent_fails_and_names_it(url: str, tmp_path: Path) -> None:
    address, failed = tmp_path / "address", anyio.Event()
    pipeline = training(tmp_path, Trainer(), SourceChannel(url, address=address, senders=1, max_senders=2))

    async def lose_a_member() -> None:
        async with lasting_member(address, "the unlucky one", 3, "stays") as unlucky:
            unlucky.send_signal(signal.SIGKILL)
        await LoopClock().set_forward_until(failed.is_set, 600)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lose_a_member)
        with pytest.raises(StageFailed, match="MemberAbsent: expected member 'the unlucky one'"):
            await pipeline.run()
        failed.set()


@pytest.mark.parametrize("url", KINDS)
async def test_a_run_without_all_members_fails_with_the_connected_ones_and_the_number_of_missing_ones(
    url: str, tmp_path: Path
) -> None:
    address, failed = tmp_path / "address", anyio.Event()
    pipeline = training(tmp_path, Trainer(), SourceChannel(url, address=address, senders=3))

    async def come_alone() -> None:
        async with lasting_member(address, "the punctual one", 3, "stays") as punctual:
            await LoopClock().set_forward_until(failed.is_set, 600)
            punctual.kill()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(come_alone)
        with pytest.raises(StageFailed, match=r"MemberAbsent: expected 3 members.* got 1 .'the punctual one'.: 2"):
            await pipeline.run()
        failed.set()


@pytest.mark.parametrize("url", KINDS)
@pytest.mark.parametrize("how", [receive, iterate])
async def test_members_that_never_come_fail_the_stream(
    url: str, how: Callable[[RemoteReceiver[TrajectoryGroup]], Awaitable[object]]
) -> None:
    async with serve(url, TrajectoryGroup, senders=2) as inbox:
        LoopClock().set_forward(600)

        with pytest.raises(MemberAbsent, match=r"got 0 .none.: 2 never came. Start them"):
            await how(inbox)
        with pytest.raises(MemberAbsent):
            await inbox.receive()


@pytest.mark.parametrize("url", KINDS)
async def test_the_stream_goes_on_without_a_member_that_never_came_where_that_was_chosen(url: str) -> None:
    async with serve(url, TrajectoryGroup, senders=2, on_absence="continue") as inbox:
        async with connect(inbox.url, TrajectoryGroup, name="a") as outbox:
            await outbox.send(group(env="a"))
            LoopClock().set_forward(600)
            await outbox.send(group(env="a"))
        assert [record.env async for record in inbox] == ["a", "a"]


async def only_close(address: str | Path, name: str | None = "a", **options: Any) -> None:
    async with connect_with_replay(address, name=name, **options):
        pass


@pytest.mark.parametrize("url", KINDS)
async def test_a_replaying_member_without_records_closes(url: str) -> None:
    async with serve(url, TrajectoryGroup, senders=1) as inbox, anyio.create_task_group() as tasks:
        tasks.start_soon(only_close, inbox.url)
        with anyio.fail_after(FAILSAFE_S), pytest.raises(anyio.EndOfStream):
            await inbox.receive()


class SavesAtOnce:
    """Tells senders that what has come is saved."""

    def received(self, peer: Any, record: TrajectoryGroup) -> TrajectoryGroup:
        peer.ended(record.id, 1, "saved", 1)
        return record

    def observed(self, peer: Any, payload: bytes) -> None: ...

    def lost(self, peer: Any, error: PeerLost) -> None: ...

    def closed(self, peer: Any) -> None: ...

    def disconnected(self, peer: Any) -> None: ...


async def saved_and_cut_off(outbox: ReplayingSender, inbox: RemoteReceiver[TrajectoryGroup]) -> None:
    """Send a record, and return when it is saved and the connection has ended, without Close."""
    await outbox.send(group(completion_lengths=[2]))
    await inbox.receive()
    while outbox.unsaved:  # noqa: ASYNC110 (a sender tells of no record that it is saved)
        await anyio.sleep(0.01)
    await inbox.aclose()
    while "connected" in repr(outbox):  # noqa: ASYNC110
        await anyio.sleep(0.01)


@pytest.mark.parametrize("url", KINDS)
async def test_a_replaying_member_that_ends_while_disconnected_reconnects_to_close(url: str, tmp_path: Path) -> None:
    address, served = anyio.Path(tmp_path / "address"), anyio.Event()

    async def be_cut_off_and_end() -> None:
        async with serve(url, TrajectoryGroup, senders=1, listener=SavesAtOnce()) as inbox:
            await address.write_text(inbox.url)
            async with connect_with_replay(Path(address), name="a") as outbox:
                await saved_and_cut_off(outbox, inbox)
                served.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(be_cut_off_and_end)
        await served.wait()
        async with serve(url, TrajectoryGroup, senders=1) as inbox:
            await address.write_text(inbox.url)
            with anyio.fail_after(FAILSAFE_S), pytest.raises(anyio.EndOfStream):
                await inbox.receive()


@pytest.mark.parametrize("url", KINDS)
async def test_a_replaying_member_that_cannot_close_raises(url: str) -> None:
    with pytest.raises((NobodyListens, PeerLost)) as raised:
        async with (
            serve(url, TrajectoryGroup, senders=1, listener=SavesAtOnce()) as inbox,
            connect_with_replay(inbox.url, name="a", reconnect_timeout_s=0) as outbox,
        ):
            await saved_and_cut_off(outbox, inbox)

    [note] = raised.value.__notes__
    assert note.startswith("everything that 'a' sent is saved, but no receiver acknowledged that it is done")


@pytest.mark.parametrize("name", [None, "a"])
async def test_a_replaying_sender_without_members_closes_when_all_is_saved(name: str | None) -> None:
    async with (
        serve("shm://", TrajectoryGroup, listener=SavesAtOnce()) as inbox,
        connect_with_replay(inbox.url, name=name) as outbox,
    ):
        await saved_and_cut_off(outbox, inbox)


class SlowToSave(Trainer):
    """Writes its checkpoint when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_save, self.saved = threading.Event(), threading.Event()

    def save(self, folder: Path, committed: Mapping[GroupId, int]) -> Path:
        self.may_save.wait(FAILSAFE_S)
        path = super().save(folder, committed)
        self.saved.set()
        return path


async def disconnected_after_close(address: Path, records: list[TrajectoryGroup]) -> None:
    """Send `records` as a replaying sender named "a" whose connection ends before it is notified that they
    are saved."""
    while not await anyio.Path(address).exists():  # noqa: ASYNC110 (a file is no event)
        await anyio.sleep(0.01)
    async with connect(await anyio.Path(address).read_text(), TrajectoryGroup, name="a") as line:
        for record in records:
            await line.send(record)
        line.send_close()


@pytest.mark.parametrize("url", KINDS)
async def test_a_member_that_was_disconnected_at_the_last_checkpoint_is_notified_later(
    url: str, tmp_path: Path
) -> None:
    trainer, address = SlowToSave(), tmp_path / "address"
    records = [group(env="a", instance_id=str(number), completion_lengths=[2, 2]) for number in range(3)]

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(training(tmp_path, trainer, SourceChannel(url, address=address, senders=1)).run)
        await disconnected_after_close(address, records)
        trainer.may_save.set()
        await anyio.to_thread.run_sync(trainer.saved.wait, FAILSAFE_S)
        await anyio.wait_all_tasks_blocked()
        async with connect_with_replay(address, name="a", reconnect_timeout_s=0) as again:
            for record in records:
                await again.send(record)

    assert trainer.trained == Counter(record.id for record in records)


async def test_a_member_that_stays_away_after_the_last_checkpoint_holds_the_run_for_its_time_only(
    tmp_path: Path,
) -> None:
    trainer, address = SlowToSave(), tmp_path / "address"
    ended = anyio.Event()

    async def run() -> None:
        await training(tmp_path, trainer, SourceChannel(address=address, senders=1)).run()
        ended.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await disconnected_after_close(address, [group(env="a", completion_lengths=[2, 2])])
        trainer.may_save.set()
        await LoopClock().set_forward_until(ended.is_set, 600)

    assert trainer.saved.is_set()


async def send_and_raise(url: str) -> None:
    async with connect(url, TrajectoryGroup, name="a") as outbox:
        await outbox.send(group(instance_id="before"))
        raise ZeroDivisionError


@pytest.mark.parametrize("url", KINDS)
async def test_a_member_whose_script_raises_is_not_done(url: str) -> None:
    async with serve(url, TrajectoryGroup, senders=1) as inbox:
        with pytest.raises(ZeroDivisionError):
            await send_and_raise(inbox.url)
        assert (await inbox.receive()).instance_id == "before"
        with pytest.raises(anyio.WouldBlock):
            inbox.receive_nowait()
        async with connect(inbox.url, TrajectoryGroup, name="a") as outbox:
            await outbox.send(group(instance_id="after"))
        assert [record.instance_id async for record in inbox] == ["after"]
