"""Senders of no fixed number that are done get what stages have gathered trained and saved, and can leave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import anyio
import pytest

from penstock import (
    AdvantageNormalizer,
    Batcher,
    GroupAssembler,
    GroupId,
    ReceiveChannel,
    SendChannel,
    SinkTrainer,
    SourceChannel,
    TrainBatch,
    TrajectoryGroup,
    drop,
    source,
)
from penstock.channels import connect_with_replay
from penstock.testing import group
from penstock.training import write_checkpoint

MANY = 10_000


class Trainer:
    """Notes the prompts of every batch; a checkpoint of it holds nothing."""

    def __init__(self) -> None:
        self.batches: list[Counter[GroupId]] = []
        self.committed: Mapping[GroupId, int] = {}

    @property
    def steps(self) -> int:
        return len(self.batches)

    def step(self, batch: TrainBatch) -> dict[str, float]:
        self.batches.append(Counter(packed.id for packed in batch.groups))
        return {}

    def save(self, folder: Path, committed: Mapping[GroupId, int]) -> Path:
        del committed
        return write_checkpoint(folder, self.steps, lambda _: None)


async def send(address: Path, *records: TrajectoryGroup, sent: anyio.Event | None = None) -> None:
    """Send `records`, set `sent`, and leave when they are saved."""
    async with connect_with_replay(address) as outbox:
        for record in records:
            await outbox.send(record)
        if sent is not None:
            sent.set()


def groups(env: str, count: int) -> list[TrajectoryGroup]:
    return [group(env=env, instance_id=str(number)) for number in range(count)]


def sink(trainer: Trainer, folder: Path) -> SinkTrainer:
    return SinkTrainer(trainer, checkpoints=folder / "checkpoints", checkpoint_every=MANY)


@pytest.mark.parametrize("url", ["shm://", "tcp://127.0.0.1:0"])
async def test_the_last_part_of_a_batch_is_trained_when_all_that_are_connected_are_done_and_not_before(
    url: str, tmp_path: Path
) -> None:
    trainer, address, sent = Trainer(), tmp_path / "address", anyio.Event()
    pipeline = source(SourceChannel(url, address=address)).then(Batcher(max_tokens=MANY)).sink(sink(trainer, tmp_path))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pipeline.run)
        async with connect_with_replay(address) as first:
            for record in groups("first", 3):
                await first.send(record)
            tasks.start_soon(partial(send, address, *groups("second", 3), sent=sent))
            await sent.wait()
        await send(address, *groups("third", 2))
        tasks.cancel_scope.cancel()

    together = Counter(record.id for record in groups("first", 3) + groups("second", 3))
    assert trainer.batches == [together, Counter(record.id for record in groups("third", 2))]


async def test_every_stage_that_gathers_is_flushed_in_the_order_of_the_records(tmp_path: Path) -> None:
    trainer, address = Trainer(), tmp_path / "address"
    pipeline = (
        source(SourceChannel(address=address))
        .then(GroupAssembler(3, stragglers="wait"))
        .then(AdvantageNormalizer("batch", batch_groups=MANY))
        .then(Batcher(max_tokens=MANY))
        .sink(sink(trainer, tmp_path))
    )
    whole = [group(env="e", instance_id=str(number), completion_lengths=[3, 3, 3]) for number in range(4)]
    part = group(env="e", instance_id="part", completion_lengths=[3, 3])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pipeline.run)
        await send(address, *whole, part)
        tasks.cancel_scope.cancel()

    assert trainer.batches == [Counter(record.id for record in whole)]


async def test_senders_of_which_everything_was_dropped_can_leave_too(tmp_path: Path) -> None:
    trainer, address = Trainer(), tmp_path / "address"
    nothing_to_learn = [group(env="e", instance_id=str(n), rewards=[1.0, 1.0]) for n in range(3)]
    pipeline = (
        source(SourceChannel(address=address))
        .then(Batcher(max_tokens=MANY, drop_zero_variance=True))
        .sink(sink(trainer, tmp_path))
    )

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pipeline.run)
        await send(address, *nothing_to_learn)
        tasks.cancel_scope.cancel()

    assert not trainer.batches


class AllButTheLast:
    """Drops the last of three groups, when the others have left."""

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        async for record in inbox:
            if record.instance_id != "2":
                await outbox.send(record)
            else:
                await anyio.wait_all_tasks_blocked()
                drop(record, "filtered", "the last")


async def test_a_stage_that_drops_the_last_record_does_not_keep_the_batch_behind_it(tmp_path: Path) -> None:
    trainer, address = Trainer(), tmp_path / "address"

    pipeline = (
        source(SourceChannel(address=address))
        .then(AllButTheLast())
        .then(Batcher(max_tokens=MANY))
        .sink(sink(trainer, tmp_path))
    )

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pipeline.run)
        await send(address, *groups("e", 3))
        tasks.cancel_scope.cancel()

    assert trainer.batches == [Counter(record.id for record in groups("e", 2))]
