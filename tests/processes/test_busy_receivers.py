"""A receiver whose event loop is held for longer than the heartbeat timeout: no sender takes it for lost.

This process receives, over every transport that has one, while its event loop is held. Then its peers are held.
"""

from __future__ import annotations

import base64
import pickle
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import numpy as np
import pytest
from tests.failsafe import FAILSAFE_S
from tests.fixed_limits import set_limits
from tests.processes import script_of_joined_workers as script
from tests.processes.children import child, line
from tests.processes.test_heartbeats import status
from tests.processes.test_joining import DIGEST, Workers
from tests.processes.test_joining import url as url  # noqa: PLC0414 (a fixture)
from tests.processes.test_joining import workers as workers  # noqa: PLC0414 (a fixture)
from tests.processes.worker_sinks import Commit
from tests.processes.worker_stages import Sample

from penstock import SourceChannel, TrajectoryGroup, joining, processes, source
from penstock.channels import serve
from penstock.weights import WeightAddress, WeightPublisher

HELD = [
    pytest.param(9.0, 3.0, id="three heartbeats"),
    pytest.param(65.0, 30.0, id="65 s", marks=pytest.mark.long),
]
"""Seconds for which the event loop is held, and the heartbeat timeout of both ends."""

RECORDS = 40
"""Many times the capacity: a sender waits for credit while the event loop is held."""

SENDER = """
    import sys, anyio
    from penstock import TrajectoryGroup
    from penstock.channels import connect
    from penstock.testing import group

    async def main(url, heartbeat_s, records):
        print("connecting", flush=True)
        async with connect(url, TrajectoryGroup, name="sender", heartbeat_timeout_s=heartbeat_s) as outbox:
            for number in range(records):
                await outbox.send(group(instance_id=str(number)))
        print(outbox.failure, flush=True)

    anyio.run(main, sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
"""

REPLAYING = """
    import sys, anyio, pathlib, structlog
    from penstock.channels import connect_with_replay
    from penstock.testing import group

    structlog.configure(processors=[lambda logger, name, event: str(event)])

    async def main(url, heartbeat_s, records):
        async with connect_with_replay(pathlib.Path(url), heartbeat_timeout_s=heartbeat_s) as outbox:
            for number in range(records):
                await outbox.send(group(instance_id=str(number)))
            print("sent", flush=True)

    anyio.run(main, sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
"""

MIRROR = """
    import base64, pickle, sys, time, anyio, structlog
    from penstock.weights import WeightSubscriber

    structlog.configure(processors=[lambda logger, name, event: str(event)])

    async def main(address, held_s):
        async with WeightSubscriber(address) as subscriber:
            version = -1
            while True:
                version = await subscriber.newer(version)
                print(version, flush=True)
                time.sleep(held_s)

    anyio.run(main, pickle.loads(base64.b64decode(sys.argv[1])), float(sys.argv[2]))
"""

Hold: TypeAlias = Callable[[], Awaitable[None]]
"""Waits until the event loop has been held."""


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(FAILSAFE_S):
        while not condition():  # noqa: ASYNC110 (no event tells of it)
            await anyio.sleep(0.01)


async def receives(url: str, heartbeat_s: float, hold: Hold) -> None:
    """Receive from a sender that waits for credit, and from one that closes meanwhile."""
    async with serve(url, TrajectoryGroup, capacity=2, heartbeat_timeout_s=heartbeat_s) as inbox:
        inbox.keep_open()
        arguments = inbox.url, str(heartbeat_s)
        with child(SENDER, *arguments, str(RECORDS)) as waiting, child(SENDER, *arguments, "2") as closing:
            received = [(await inbox.receive()).instance_id for _ in range(4)]
            await hold()
            received += [(await inbox.receive()).instance_id for _ in range(RECORDS - 2)]
            assert sorted(received) == sorted(map(str, [0, 1, *range(RECORDS)]))
            for sender in waiting, closing:
                assert [await line(sender), await line(sender)] == ["connecting", "None"]
                assert await status(sender) == 0
        assert inbox.rejected == 0


async def receives_from_senders_that_replay(url: str, folder: Path, heartbeat_s: float, hold: Hold) -> None:
    address, sink = folder / f"address {url[:3]}", Commit(enough=100)
    channel = SourceChannel(url, address=address, heartbeat_timeout_s=heartbeat_s)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(source(channel).sink(sink).run)
        with child(REPLAYING, str(address), str(heartbeat_s), "100") as sender:
            await until(lambda: bool(sink.received))
            await hold()
            assert await line(sender) == "sent"  # and nothing of another connection before
            await until(lambda: len(sink.received) == 100)
    assert len(set(sink.received)) == 100


async def receives_from_workers_that_join(workers: Workers, hold: Hold) -> None:
    sink = Commit(enough=200)
    pipeline = source(script.endless(), on=joining(expected=1, url=workers.url, digest=DIGEST)).sink(sink)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pipeline.run)
        await workers.start("endless")
        await until(lambda: bool(sink.received))
        await hold()
    assert pipeline.report is not None
    assert pipeline.report.balance.ended["lost"] == 0
    assert pipeline.report.balance.ended["trained"] == 200 * script.GROUP_SIZE


def tensors(value: float) -> dict[str, np.ndarray[Any, Any]]:
    return {"weight": np.full(2**20, value, np.float32)}


@asynccontextmanager
async def published(heartbeat_s: float) -> AsyncIterator[tuple[WeightPublisher, str]]:
    """Publish version 1; yield the publisher, and the address as a sampler of another host has it."""
    async with (
        WeightPublisher(tensors(0)) as publisher,
        publisher.serve("tcp://127.0.0.1:0", heartbeat_timeout_s=heartbeat_s) as address,
    ):
        await publisher.publish(tensors(1), 1)
        yield publisher, _pickled(replace(address, host="another"))


def _pickled(address: WeightAddress) -> str:
    return base64.b64encode(pickle.dumps(address)).decode()


async def publishes(heartbeat_s: float, hold: Hold) -> None:
    async with published(heartbeat_s) as (publisher, address):
        with child(MIRROR, address, "0") as mirror:
            assert await line(mirror) == "1"
            await hold()
            await publisher.publish(tensors(2), 2)
            assert await line(mirror) == "2"  # and nothing of another connection before


@pytest.mark.parametrize(("held_s", "heartbeat_s"), HELD)
async def test_a_receiver_whose_event_loop_is_held_is_not_taken_for_lost(
    held_s: float, heartbeat_s: float, workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, WORKER_HEARTBEAT_TIMEOUT_S=heartbeat_s)
    ready, was_held = list[None](), anyio.Event()

    async def hold() -> None:
        ready.append(None)
        await was_held.wait()

    scenes: list[Callable[[], Coroutine[Any, Any, None]]] = [
        partial(receives, "tcp://127.0.0.1:0", heartbeat_s, hold),
        partial(receives, "shm://", heartbeat_s, hold),
        partial(receives_from_senders_that_replay, "tcp://127.0.0.1:0", tmp_path, heartbeat_s, hold),
        partial(receives_from_senders_that_replay, "shm://", tmp_path, heartbeat_s, hold),
        partial(receives_from_workers_that_join, workers, hold),
        partial(publishes, heartbeat_s, hold),
    ]
    with anyio.fail_after(FAILSAFE_S + held_s):
        async with anyio.create_task_group() as tasks:
            for scene in scenes:
                tasks.start_soon(scene)
            await until(lambda: len(ready) == len(scenes))
            time.sleep(held_s)  # noqa: ASYNC251 (the event loop is held)
            was_held.set()


@pytest.mark.long
@pytest.mark.parametrize(("held_s", "heartbeat_s"), HELD)
async def test_a_mirror_whose_event_loop_is_held_is_not_taken_for_lost(held_s: float, heartbeat_s: float) -> None:
    async with published(heartbeat_s) as (publisher, address):
        with child(MIRROR, address, str(held_s)) as mirror:
            assert await line(mirror) == "1"
            subscribers = publisher.subscribers
            await publisher.publish(tensors(2), 2)
            assert await line(mirror) == "2"
            assert publisher.subscribers == subscribers


@pytest.mark.long
@pytest.mark.parametrize(("held_s", "heartbeat_s"), HELD)
async def test_a_worker_of_a_middle_stage_whose_event_loop_is_held_is_not_taken_for_lost(
    held_s: float, heartbeat_s: float, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, WORKER_HEARTBEAT_TIMEOUT_S=heartbeat_s)
    monkeypatch.setenv("HELD_S", str(held_s))
    sink, on = Commit(), joining(expected=1, url=workers.url, digest=DIGEST)
    pipeline = source(Sample(RECORDS)).then(script.busy(), on=on).sink(sink)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pipeline.run)
        await workers.start("busy")

    assert len(set(sink.received)) == RECORDS
    assert pipeline.report is not None
    assert pipeline.report.balance.ended["lost"] == 0


async def test_a_sender_connects_to_a_receiver_whose_event_loop_is_held() -> None:
    async with serve("tcp://127.0.0.1:0", TrajectoryGroup) as inbox:
        with child(SENDER, inbox.url, "3", "1") as sender:
            assert await line(sender) == "connecting"
            time.sleep(5.0)  # noqa: ASYNC251 (the event loop is held)
            assert (await inbox.receive()).instance_id == "0"
            assert await line(sender) == "None"


@pytest.mark.long
async def test_workers_that_start_while_the_event_loop_is_held_are_not_taken_for_hung() -> None:
    sink = Commit()
    pipeline = source(Sample(20), on=processes(2)).sink(sink)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pipeline.run)
        await until(lambda: any(worker.pid for stage in pipeline.statistics().stages for worker in stage.workers))
        time.sleep(65.0)  # noqa: ASYNC251 (the event loop is held for longer than `start_timeout_s`)

    assert len(sink.received) == 20
    assert pipeline.report is not None
    assert [worker.restarts for worker in pipeline.report.statistics.stages[0].workers] == [0, 0]
