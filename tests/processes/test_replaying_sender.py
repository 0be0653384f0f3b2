"""Senders that outlive their trainer: it is killed when that makes a difference, and everything is trained once."""

from __future__ import annotations

import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.to_thread
import msgspec
import pytest
from tests.faults.zygote import ROOT, environment
from tests.journal.script_of_a_run import GROUP_TOKENS, State
from tests.ports import free_port

from penstock import TrajectoryGroup
from penstock.channels import RemoteSender, ReplayingSender, connect_with_replay, serve
from penstock.errors import NobodyListens, RecordTooLarge, ReplayBufferFull
from penstock.testing import group
from penstock.training import latest_checkpoint

SCRIPT = Path(__file__).with_name("script_of_a_trainer.py")

GROUPS = 60
"""Of each sender."""

DEATHS = {
    "shm": [("received", 9), ("stepped", 2), ("saving", 2), ("half saved", 1), ("saved", 1)],
    "tcp": [("stepped", 4)],
}
"""The moments at which the trainer kills itself, one for each start: an action, and how often it was done before."""


def record(number: int) -> TrajectoryGroup:
    lengths = [GROUP_TOKENS // 2 - 2] * 2
    return group(instance_id=str(number), seed=number, completion_lengths=lengths)


async def train(folder: Path, url: str) -> None:
    """Run one trainer after another, until one reaches the end."""
    for moment, nth in [*DEATHS[url[:3]], ("never", 1)]:
        command = [sys.executable, str(SCRIPT), str(folder), url, moment, str(nth)]
        ran = await anyio.run_process(command, env=environment(), cwd=ROOT, check=False, stdout=None, stderr=None)
        assert ran.returncode == (0 if moment == "never" else -signal.SIGKILL), moment


async def send_to(url: str | Path, first: int, **options: Any) -> None:
    async with connect_with_replay(url, name=f"sender of {first}", **options) as outbox:
        for number in range(first, first + GROUPS):
            await outbox.send(record(number))
    assert not outbox.unsaved


def trained(folder: Path) -> Counter[int]:
    checkpoint = latest_checkpoint(folder / "checkpoints")
    assert checkpoint is not None
    return Counter(map(int, msgspec.json.decode((checkpoint / "state").read_bytes(), type=State).trained))


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.long)])
async def test_with_a_kill_at_any_moment_of_the_trainer_everything_is_trained_once(
    transport: str, tmp_path: Path
) -> None:
    url, found = (
        ("shm://", tmp_path / "address") if transport == "shm" else (own := f"tcp://127.0.0.1:{free_port()}", own)
    )

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(train, tmp_path, url)
        tasks.start_soon(send_to, found, 0)
        tasks.start_soon(send_to, found, 1000)

    sent = [*range(GROUPS), *range(1000, 1000 + GROUPS)]
    assert await anyio.to_thread.run_sync(trained, tmp_path) == Counter(number for number in sent if number % 7)


class Line:
    """A connection that takes a record when it may."""

    counts_members = False

    def __init__(self, refusal: Exception | None = None) -> None:
        self.taken: list[TrajectoryGroup] = []
        self.may_take = anyio.Event()
        self._refusal = refusal

    async def send(self, offered: TrajectoryGroup) -> None:
        if self._refusal is not None:
            raise self._refusal
        await self.may_take.wait()
        self.taken.append(offered)

    async def wait_failed(self) -> None:
        await anyio.sleep_forever()


async def test_a_send_that_is_cancelled_while_a_receiver_comes_has_sent_nothing() -> None:
    sender, line, given_up = ReplayingSender(2, 2**20, 1.0), Line(), anyio.CancelScope()

    async def send() -> None:
        with given_up:
            await sender.send(record(0))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(sender._use, cast("RemoteSender[TrajectoryGroup]", line))
        await anyio.wait_all_tasks_blocked()
        given_up.cancel()
        await anyio.wait_all_tasks_blocked()
        line.may_take.set()
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()

    assert given_up.cancelled_caught
    assert (line.taken, sender.unsaved) == ([], 0)


async def test_a_record_that_is_too_large_fails_its_own_send_alone() -> None:
    sender, line = ReplayingSender(2, 2**20, 1.0), Line(RecordTooLarge("much"))

    async def connect() -> None:
        await anyio.wait_all_tasks_blocked()
        await sender._use(cast("RemoteSender[TrajectoryGroup]", line))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(connect)
        with pytest.raises(RecordTooLarge, match="much"):
            await sender.send(record(0))
        tasks.cancel_scope.cancel()

    assert not sender.unsaved


async def test_exceeding_the_replay_capacity_is_an_error_with_the_remedy() -> None:
    async with serve("shm://", TrajectoryGroup) as inbox:
        with pytest.raises(ReplayBufferFull, match="write checkpoints more often"):
            await send_to(inbox.url, 0, capacity=2)


async def test_a_receiver_that_never_comes_back_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    with pytest.raises(NobodyListens):
        await send_to(f"shm://{tmp_path}", 0, reconnect_timeout_s=0.01)
