"""Stages that the tests of workers send to processes; they kill themselves where a test wants them dead."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
from msgspec.structs import replace
from tests.failsafe import FAILSAFE_S

from penstock import ReceiveChannel, SendChannel, TrajectoryGroup, current, drop, host_lock
from penstock.testing import group


@dataclass(frozen=True)
class Sample:
    """Sends `count` groups of two trajectories, its share of them in each worker."""

    count: int

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        worker = current().worker
        for number in range(worker.index, self.count, worker.count):
            await outbox.send(group(instance_id=f"{number}.{worker.restart}", seed=number))


@dataclass(frozen=True)
class SampleWith:
    """Sends a group with the interpreter of its worker as its id, and what the module `known` says."""

    known: str

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        said = import_module(self.known).SAID
        await outbox.send(group(instance_id=f"{sys.prefix} {said} {os.environ.get('PYTHONPATH')}"))


@dataclass(frozen=True)
class SampleTwice:
    """Sends `count` groups of two trajectories, every one of them twice and in each worker."""

    count: int

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        for number in range(self.count):
            record = group(instance_id=str(number), seed=number)
            await outbox.send(record)
            await outbox.send(record)


@dataclass(frozen=True)
class SampleOneEach:
    """Of each of `count` prompts, every worker samples one repetition; the second dies half way, and begins anew."""

    count: int

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        worker = current().worker
        for number in range(self.count):
            if worker.index == 1 and not worker.restart and number == self.count // 2:
                await anyio.lowlevel.checkpoint()  # records of one tick are published together
                os.kill(os.getpid(), signal.SIGKILL)
            name = str(number)
            await outbox.send(group(instance_id=name, completion_lengths=[3], rollout_ids=[worker.index]))


@dataclass(frozen=True)
class SampleAndDie(Sample):
    """The first worker admits one group more than it sends, and dies, unless it was restarted `lives` times."""

    after: int = 3
    lives: int = 1
    signal: int = signal.SIGKILL
    """0 for `os._exit(3)`."""

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        context = current()
        if context.worker.index or context.worker.restart >= self.lives:
            return await super().run(outbox)
        for number in range(self.after):
            await outbox.send(group(instance_id=f"doomed {number}.{context.worker.restart}"))
        await anyio.lowlevel.checkpoint()  # records of one tick are published together
        context.ledger.admit(group(instance_id=f"unsent.{context.worker.restart}").id, [0, 1])
        if self.signal:
            os.kill(os.getpid(), self.signal)
            await anyio.sleep_forever()
        os._exit(3)


@dataclass(frozen=True)
class SampleStepsAndDie:
    """Sends two groups for each of `steps` optimizer steps, and dies when the last one is done."""

    steps: int

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        for number in range(2 * self.steps):
            await outbox.send(group(instance_id=str(number)))
        await current().ledger.reached(self.steps)
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class SampleForever:
    """Never ends by itself."""

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        worker, number = current().worker, 0
        while True:
            await outbox.send(group(instance_id=f"{number}.{worker.index}"))
            number += 1


@dataclass(frozen=True)
class SampleVersioned:
    """Never ends by itself; its samples have the newest version of the weights that it knows."""

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        context, number = current(), 0
        while True:
            name = f"{number}.{context.worker.index}"
            await outbox.send(group(instance_id=name, policy_version=context.ledger.step))
            number += 1


@dataclass(frozen=True)
class SamplePaced:
    """Begins a group only while none of its own is in flight."""

    count: int

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        ledger = current().ledger
        for number in range(self.count):
            await ledger.room(1)
            await outbox.send(group(instance_id=str(number)))


@dataclass(frozen=True)
class SampleObserved(Sample):
    """Observes a metric and drops a group, as sources do."""

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        context = current()
        context.metrics.mean("temperature", [1.0, 3.0])
        failed = group(instance_id="failed")
        context.ledger.admit(failed.id, [0, 1])
        drop(failed, "failed", "no such tool")
        await super().run(outbox)
        context.metrics.total("late", 1)


@dataclass(frozen=True)
class Raise:
    """Fails in a function of its own."""

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        await outbox.send(group())
        self.look_up("prompt")

    def look_up(self, key: str) -> None:
        raise KeyError(key)


@dataclass(frozen=True)
class IgnoreSigterm(SampleForever):
    """Refuses to be stopped."""

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        with anyio.CancelScope(shield=True):
            await super().run(outbox)


@dataclass(frozen=True)
class WithoutTorch(Sample):
    """Fails if tensors were imported, and speaks."""

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        assert "torch" not in sys.modules
        print(f"worker {current().worker.index} speaks", flush=True)  # noqa: T201 (a test listens)
        await super().run(outbox)


@dataclass(frozen=True)
class DieWhenUnpickled:
    """Dies before it can connect, in the first life of its process."""

    marker: str
    """A path that exists once it has died."""

    def __setstate__(self, state: dict[str, str]) -> None:
        object.__setattr__(self, "marker", state["marker"])
        if not os.path.exists(self.marker):  # noqa: PTH110 (as plain as can be)
            os.close(os.open(self.marker, os.O_CREAT))
            os._exit(7)

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        await outbox.send(group())


class HangWhenUnpickled:
    """A source of which no worker gets as far as `run`."""

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return signal.pause, ()

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        raise NotImplementedError


class RelayThatHangsWhenUnpickled:
    """The same as a middle stage."""

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return signal.pause, ()

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class Judge:
    """Drops every fifth group; a worker with `dies_once` dies at its third group, once."""

    dies_once: bool = False
    signal: int = signal.SIGKILL

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        worker, seen = current().worker, 0
        async for record in inbox:
            seen += 1
            if self.dies_once and seen == 3 and not worker.restart:
                os.kill(os.getpid(), self.signal)
            current().metrics.total("judged", 1)
            if int(record.instance_id.partition(".")[0]) % 5:
                await outbox.send(record)
            else:
                drop(record, "filtered", "every fifth")


@dataclass(frozen=True)
class Double:
    """Doubles the rewards; a middle stage."""

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        async for record in inbox:
            await outbox.send(replace(record, rewards=record.rewards * 2))


@dataclass(frozen=True)
class ReadWhatOneMakes:
    """Sends a group named by the text of a file that one worker makes; the first to try may die of it."""

    folder: str
    first_dies: bool = False

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        worker, folder = current().worker, anyio.Path(self.folder)
        await (folder / f"began.{worker.index}").touch()
        async with host_lock(self.folder):
            if not await (folder / "made").exists():
                await self.make(folder)
        await outbox.send(group(instance_id=f"{worker.index}: {await (folder / 'made').read_text()}"))

    async def make(self, folder: anyio.Path) -> None:
        """Make the file, once all workers are there to make it."""
        worker, attempts = current().worker, await anyio.to_thread.run_sync(attempts_in, Path(folder))
        await (folder / f"attempt.{worker.index}.{worker.restart}").touch()
        for index in range(worker.count):
            await existing(folder / f"began.{index}")
        await (folder / "made.part").write_text(f"attempt {attempts}")
        if self.first_dies and not attempts:
            os.kill(os.getpid(), signal.SIGKILL)
        await (folder / "made.part").rename(folder / "made")


def attempts_in(folder: Path) -> int:
    """Return how many times workers began to make the file."""
    return len([*folder.glob("attempt.*")])


async def existing(path: anyio.Path) -> None:
    """Wait until `path` exists."""
    with anyio.fail_after(FAILSAFE_S):
        while not await path.exists():  # noqa: ASYNC110 (another process makes it)
            await anyio.sleep(0.01)
