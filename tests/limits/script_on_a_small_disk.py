"""Run with weights and a journal on a disk that becomes full, and has space again.

    python -m tests.limits.script_on_a_small_disk FOLDER

FOLDER is a disk of its own. Prints lines `key: text`.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

import anyio
import msgspec
import torch
from tests.resumption import small_run
from tests.tiny_model import TinyModel

from penstock import Batcher, Pipeline, ReceiveChannel, SendChannel, SinkTrainer, SourceChannel, TrajectoryGroup, source
from penstock._pipeline.durability.journal import open_journal
from penstock.channels import ChannelKey
from penstock.errors import DiskFull, JournalFull, StageFailed
from penstock.losses import AdvantageWeighted
from penstock.testing import group
from penstock.torch import TorchTrainer, WeightFolder
from penstock.weights import WeightSubscriber

torch.set_num_threads(1)  # a second one spins beside other tests, and gains nothing with tensors this small

ROOMS = (0, 2**15, 2**18)
"""Bytes that the disk has left for a run that is continued: from none to more than it needs."""

model = partial(TinyModel, vocabulary=1000, width=64)
"""Its weights take 750 KB, and Adam's state twice that."""


class Groups:
    """Sends groups for ever."""

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        for number in count():
            sent = group(instance_id=str(number), seed=number)
            await outbox.send(sent.with_advantages(sent.rewards.repeat(sent.lengths())))


class Ignore:
    """Leaves what it receives."""

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        async for _ in inbox:
            pass


def pipeline_until(step: int, checkpoint_every: int | None) -> tuple[Pipeline, TorchTrainer]:
    trainer = TorchTrainer(model(), optimizer=partial(torch.optim.Adam, lr=0.01), loss=AdvantageWeighted())
    batches = source(Groups()).then(Batcher(max_tokens=1024, sequences=4))
    return batches.sink(SinkTrainer(trainer, max_steps=step, checkpoint_every=checkpoint_every)), trainer


def train(folder: Path, step: int, checkpoint_every: int | None = 1) -> TorchTrainer:
    pipeline, trainer = pipeline_until(step, checkpoint_every)
    anyio.run(partial(pipeline.run, folder=folder))
    return trainer


@contextmanager
def full_but_for(disk: Path, room: int) -> Iterator[None]:
    """Leave `room` bytes of the disk within the body."""
    gc.collect()  # a removed file that an object in a cycle has open takes its space until then
    ballast = disk / "ballast"
    space = os.statvfs(disk)
    ballast.write_bytes(bytes(max(0, space.f_bavail * space.f_frsize - room)))
    try:
        yield
    finally:
        ballast.unlink()


def names(folder: Path) -> str:
    return " ".join(sorted(path.name for path in folder.iterdir()))


def report(key: str, text: object) -> None:
    sys.stdout.write(f"{key}: {text}\n")


def fails(key: str, train: partial[TorchTrainer]) -> None:
    try:
        train()
    except StageFailed as failed:
        report(key, failed)
    else:
        report(key, "nothing was raised")


def steps_of(folder: Path) -> list[int]:
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert all(line.endswith(b"\n") for line in lines)
    return [msgspec.json.decode(line)["step"] for line in lines]


def checkpoints(disk: Path) -> None:
    folder = disk / "run"
    train(folder, 1)
    for room in (2**20, 2**16, 0):  # torch meets the full disk in the optimizer's file, then safetensors in the weights
        with full_but_for(disk, room):
            fails(f"checkpoint {room}", partial(train, folder, 2))
            report(f"left {room}", names(folder / "checkpoints"))
    report("resumed", train(folder, 2).steps)
    report("steps", steps_of(folder))


def metrics(disk: Path) -> None:
    folder = disk / "metered"
    train(folder, 1, None)
    with full_but_for(disk, 0):
        fails("metrics", partial(train, folder, 200, None))
        report("whole lines", steps_of(folder) == list(range(1, len(steps_of(folder)) + 1)))
    train(folder, 20, None)
    report("each step once", steps_of(folder) == list(range(1, 21)))


async def weights(disk: Path) -> None:
    folder, trained = disk / "weights", model()
    async with WeightFolder(folder, trained) as publisher:
        await publisher.publish(trained.state_dict(), 0)
        await publisher.written()
        for room in (2**16, 0):
            with full_but_for(disk, room):
                try:
                    await publisher.publish(trained.state_dict(), 1)
                    await publisher.written()
                except DiskFull as error:
                    report(f"weights {room}", error)
                report(f"versions {room}", names(folder))
        await publisher.publish(trained.state_dict(), 1)
        await publisher.written()
        async with WeightSubscriber(publisher.url) as subscriber:
            report("published", await subscriber.newer())


def journal(disk: Path) -> None:
    folder = disk / "journal"
    with open_journal(folder, capacity_bytes=2**30, fsync=True) as files:
        files.append([group(instance_id="0")])
        with full_but_for(disk, 2**14):
            kept = appended_until_full(files.append)
        files.append([group(instance_id="after")])
        reading = files.read(files.volumes[0])
    report("journal whole", not reading.damage and not reading.torn and len(reading.records) == kept + 2)


def appended_until_full(append: Callable[[list[TrajectoryGroup]], object]) -> int:
    number = 0
    while True:
        try:
            append([group(instance_id=str(number))])
        except JournalFull as error:
            report("journal", error)
            return number
        number += 1


def small_files(disk: Path) -> None:
    (folder := disk / "small").mkdir()
    with full_but_for(disk, 0):
        try:
            ChannelKey.create(folder / "a.key")
        except DiskFull as error:
            report("key", error)
        channel = SourceChannel("tcp://127.0.0.1:0", address=folder / "address", key=ChannelKey(bytes(32)))
        try:
            anyio.run(source(channel).sink(Ignore()).run)
        except StageFailed as failed:
            report("address", failed)
    report("left of them", names(folder))


def whole_runs(disk: Path) -> None:
    """Continue a run of which every file meets the full disk at some moment, and continue it again with room."""
    small_run.trained(disk / "before", small_run.BEFORE)
    shutil.copytree(disk / "before", disk / "whole", symlinks=True)
    expected = small_run.trained(disk / "whole", small_run.STEPS)
    outcomes: list[str] = []
    for room in ROOMS:
        shutil.copytree(disk / "before", folder := disk / f"room {room}", symlinks=True)
        with full_but_for(disk, room):
            try:
                small_run.trained(folder, small_run.STEPS)
            except (DiskFull, StageFailed) as error:
                outcomes.append("DiskFull" if "No space left on device" in str(error) else str(error))
            else:
                outcomes.append("trained")
        if small_run.trained(folder, small_run.STEPS) != expected:
            outcomes.append(f"other weights with {room} bytes")
        shutil.rmtree(folder)
    report("outcomes", sorted(set(outcomes)))


def main(disk: Path) -> None:
    small_files(disk)
    whole_runs(disk)
    checkpoints(disk)
    metrics(disk)
    anyio.run(weights, disk)
    journal(disk)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
