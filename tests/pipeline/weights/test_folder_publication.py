"""Versions in a folder are written while the trainer goes on; a failure of that is never silent."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file
from structlog.testing import capture_logs
from tests.failsafe import FAILSAFE_S

from penstock import Context, SinkTrainer, TrainBatch
from penstock.accounting import Ledger
from penstock.channels import memory_channel
from penstock.errors import DiskFull
from penstock.integrations.trl import TRLTransfer
from penstock.policies import EnginePublisher
from penstock.testing import batch, drive_sink, entered
from penstock.torch import WeightFolder

WRITTEN = "weights.safetensors"


def weights(value: float = 0.0) -> dict[str, Any]:
    return {"weight": np.full((3, 5), value, np.float32)}


def versions(folder: Path) -> list[int]:
    """Return the versions that a sampler can see."""
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def unfinished(folder: Path) -> list[str]:
    return [path.name for path in folder.glob(".unfinished*")]


def content(folder: Path, version: int) -> set[float]:
    return set(load_file(folder / f"step-{version:08d}" / WRITTEN)["weight"].flatten().tolist())


class HeldDisk:
    """A disk that completes nothing until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._released = threading.Event()
        synced = os.fsync

        def fsync(file: int) -> None:
            self._released.wait(FAILSAFE_S)
            synced(file)

        monkeypatch.setattr(os, "fsync", fsync)

    def release(self) -> None:
        self._released.set()


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk be full, until `monkeypatch` is undone."""

    def fsync(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file)

    monkeypatch.setattr(os, "fsync", fsync)


async def test_publish_returns_before_the_version_is_written_and_the_tensors_may_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = weights(1)

    async with WeightFolder(tmp_path, trained) as publisher:
        disk = HeldDisk(monkeypatch)
        await publisher.publish(trained, 1)
        assert versions(tmp_path) == []
        trained["weight"][:] = 7
        disk.release()
        await publisher.written()

        assert content(tmp_path, 1) == {1}


async def test_the_next_publish_waits_until_the_version_before_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with WeightFolder(tmp_path, weights()) as publisher:
        disk = HeldDisk(monkeypatch)
        await publisher.publish(weights(1), 1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publisher.publish, weights(2), 2)
            await anyio.wait_all_tasks_blocked()
            assert publisher.version == 1
            disk.release()

    assert [content(tmp_path, version) for version in (1, 2)] == [{1}, {2}]


def numbered(step: int) -> TrainBatch:
    made = batch(groups=1)
    return msgspec.structs.replace(made, groups=tuple(each._replace(instance_id=str(step)) for each in made.groups))


@dataclass
class Trains:
    """A trainer whose second step releases the disk that holds the first version."""

    folder: Path
    disk: HeldDisk | None = None
    seen: list[list[int]] = field(default_factory=list)
    """The versions in the folder at each step."""

    def step(self, batch: TrainBatch) -> dict[str, float]:  # noqa: ARG002 (of the interface)
        self.seen.append(versions(self.folder))
        if len(self.seen) == 2 and self.disk is not None:
            self.disk.release()
        return {}

    def weights(self) -> Mapping[str, Any]:
        return weights(len(self.seen))


async def test_a_step_does_not_wait_until_the_weights_of_the_one_before_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trains(tmp_path)

    async with WeightFolder(tmp_path, weights()) as publisher:
        await publisher.publish(weights(), 0)
        await publisher.written()
        trainer.disk = HeldDisk(monkeypatch)
        await drive_sink(SinkTrainer(trainer, publisher), [numbered(1), numbered(2)])

    assert trainer.seen == [[0], [0]]
    assert [content(tmp_path, version) for version in (1, 2)] == [{1}, {2}]


async def test_a_publisher_that_closes_or_is_cancelled_has_written_its_last_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with anyio.create_task_group() as tasks, WeightFolder(tmp_path, weights()) as publisher:
        disk = HeldDisk(monkeypatch)
        await publisher.publish(weights(3), 3)
        tasks.cancel_scope.cancel()
        disk.release()

    assert content(tmp_path, 3) == {3}
    assert unfinished(tmp_path) == []


# -- readers of the newest version -------------------------------------------------------------------------------------


@dataclass
class Loads:
    """An engine that notes the versions in the folder when it is to load one."""

    folder: Path
    seen: list[list[int]] = field(default_factory=list)

    async def update_weights(self, url: str, version: int) -> None:
        assert (url, version) == (f"file://{self.folder}", 1 + len(self.seen))
        self.seen.append(await anyio.to_thread.run_sync(versions, self.folder))

    async def sleep(self) -> None:
        pass

    async def wake_up(self) -> None:
        pass


async def test_engines_load_a_version_when_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = Loads(tmp_path)

    async with WeightFolder(tmp_path, weights()) as publisher:
        disk = HeldDisk(monkeypatch)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(EnginePublisher(publisher, [engine]).publish, weights(), 1)
            await anyio.wait_all_tasks_blocked()
            assert engine.seen == []
            disk.release()
        await publisher.publish(weights(), 2)
        async with publisher.sync(engine):
            pass

    assert engine.seen == [[1], [1, 2]]


def test_weights_of_another_trainer_are_written_when_they_are_sent(tmp_path: Path) -> None:
    transfer = TRLTransfer(WeightFolder(tmp_path, weights()))

    transfer.init_weight_transfer()
    for expected in (1, 2):
        transfer.send_weights(iter(weights(expected).items()))
        assert content(tmp_path, expected) == {expected}
    transfer.destroy()


# -- failures ----------------------------------------------------------------------------------------------------------

FULL = "expected room for the files of step {} in .*No space left on device"


async def test_a_version_for_which_the_disk_is_full_is_raised_by_the_next_publish_and_can_be_published_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with WeightFolder(tmp_path, weights()) as publisher:
        await publisher.publish(weights(1), 1)
        await publisher.written()
        fill_disk(monkeypatch)
        await publisher.publish(weights(2), 2)
        with pytest.raises(DiskFull, match=FULL.format(2)):
            await publisher.publish(weights(3), 3)
        assert (publisher.version, versions(tmp_path)) == (1, [1])
        monkeypatch.undo()
        await publisher.publish(weights(4), 2)

    assert content(tmp_path, 2) == {4}


async def published_on_a_full_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception | None = None
) -> None:
    async with WeightFolder(folder, weights()) as publisher:
        fill_disk(monkeypatch)
        await publisher.publish(weights(1), 1)
        if failure is not None:
            raise failure


async def test_a_full_disk_for_the_last_version_is_raised_at_the_end_and_the_lock_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DiskFull, match=FULL.format(1)):
        await published_on_a_full_disk(tmp_path, monkeypatch)
    monkeypatch.undo()

    async with WeightFolder(tmp_path, weights()) as publisher:
        await publisher.publish(weights(1), 1)


async def test_an_exception_of_the_body_is_raised_and_a_full_disk_for_the_last_version_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with capture_logs() as logs, pytest.raises(ZeroDivisionError):
        await published_on_a_full_disk(tmp_path, monkeypatch, failure=ZeroDivisionError())

    (logged,) = (each for each in logs if each["event"] == "weights_not_written")
    assert re.match(FULL.format(1), logged["reason"])


async def test_a_run_whose_samplers_wait_for_a_version_for_which_the_disk_is_full_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox, inbox = memory_channel[TrainBatch](1)

    async with outbox, inbox, WeightFolder(tmp_path, weights()) as publisher:
        fill_disk(monkeypatch)
        with (
            anyio.fail_after(FAILSAFE_S),
            pytest.raises(DiskFull, match=FULL.format(0)),
            entered(Context(ledger=Ledger(admits_on_end=True))),
        ):
            await SinkTrainer(Trains(tmp_path), publisher).run(inbox)
