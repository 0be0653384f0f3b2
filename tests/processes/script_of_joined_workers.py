"""A script whose stages run in workers that join the pipeline of a test."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import numpy as np
from msgspec.structs import replace
from tests import wire
from tests.processes.blocking_environments import Blocking, close_descriptors, wait_for_the_kernel
from tests.processes.worker_stages import Sample

from penstock import ReceiveChannel, SendChannel, SourceEnv, StopReason, TrajectoryGroup, current
from penstock.environments import RolloutResult
from penstock.errors import NobodyListens, OutOfFileDescriptors
from penstock.policies import Completion, NoOpPolicy
from penstock.testing import group

GROUP_SIZE = 2

FOLDER = Path(os.environ.get("JOINED_FOLDER", "."))
"""Where the workers write, and find, the files by which a test directs them."""


def first(name: str) -> bool:
    """Return whether no worker has called this before with `name`, of which a file tells."""
    if (FOLDER / name).exists():
        return False
    (FOLDER / name).touch()
    return True


async def go() -> None:
    """Wait until the file `go` exists."""
    while not (FOLDER / "go").exists():  # noqa: ASYNC110 (no event tells of it)
        await anyio.sleep(0.01)


@dataclass
class Rollouts:
    """Every rollout writes the name of its prompt; from prompt `held` on they wait until the file `go` exists."""

    held: int | None = None

    async def rollout(self, task: int, repetition: int) -> RolloutResult:
        if repetition == 0:
            (FOLDER / f"prompt {task} in {os.getpid()}").touch()
        if self.held is not None and task >= self.held:
            await go()
        completion = Completion(
            tokens=np.arange(3, dtype=np.int32),
            logprobs=np.zeros(3, np.float32),
            stop_reason=StopReason.STOP,
            policy_versions=np.zeros(3, np.int64),
        )
        return RolloutResult(turns=[np.arange(2, dtype=np.int32), completion], reward=float(repetition))


def numbered() -> SourceEnv:
    """Sample 20 prompts."""
    return SourceEnv(Rollouts, NoOpPolicy(), group_size=GROUP_SIZE, groups=20, concurrency=4)


def held() -> SourceEnv:
    """Sample 20 prompts, of which those from the fourth on wait."""
    return SourceEnv(partial(Rollouts, 3), NoOpPolicy(), group_size=GROUP_SIZE, groups=20, concurrency=4)


def endless() -> SourceEnv:
    return SourceEnv(Rollouts, NoOpPolicy(), group_size=GROUP_SIZE, concurrency=8)


def eighteen() -> SourceEnv:
    """Sample 18 prompts."""
    return SourceEnv(Rollouts, NoOpPolicy(), group_size=GROUP_SIZE, groups=18, concurrency=16)


def shared() -> Sample:
    """Sample a share of 20 groups, that of the worker's place."""
    return Sample(20)


@dataclass(frozen=True)
class WaitForGo(Sample):
    """Sends its share when the file `go` exists."""

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        worker = current().worker
        (FOLDER / f"place {worker.index} of {worker.count}").touch()
        await go()
        await super().run(outbox)


waiting = WaitForGo(20)


@dataclass(frozen=True)
class Raise:
    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        await outbox.send(group(instance_id="first"))
        raise ValueError("expected water, got sand")


def raising() -> Raise:
    return Raise()


@dataclass(frozen=True)
class Double:
    """Doubles the rewards; a middle stage."""

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        async for record in inbox:
            (FOLDER / f"doubled in {os.getpid()}").touch()
            await outbox.send(replace(record, rewards=record.rewards * 2))


def doubling() -> Double:
    return Double()


@dataclass(frozen=True)
class Busy(Double):
    """Holds the event loop before the first record, and at it."""

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        held_s = float(os.environ["HELD_S"])
        time.sleep(held_s)  # noqa: ASYNC251 (the event loop is held)
        await outbox.send(await inbox.receive())
        time.sleep(held_s)  # noqa: ASYNC251
        await super().run(inbox, outbox)


def busy() -> Busy:
    return Busy()


def interrupted() -> Double:
    """Return it; the first time, this process is asked to stop before."""
    if first("interrupted"):
        os.kill(os.getpid(), signal.SIGTERM)
    return Double()


@dataclass(frozen=True)
class Dies(Sample):
    """Dies after a group, the first time."""

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        if first("died"):
            await outbox.send(group(instance_id="doomed"))
            os.kill(os.getpid(), signal.SIGKILL)
        await super().run(outbox)


def dying() -> Dies:
    return Dies(20)


@dataclass(frozen=True)
class CutOff(Sample):
    """Does not reach its weights, the first time."""

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        if first("cut off"):
            raise NobodyListens("expected a publisher at tcp://trainer:5556, got no route to host")
        await super().run(outbox)


def cut_off() -> CutOff:
    return CutOff(20)


@dataclass(frozen=True)
class Limited(Sample):
    """Has too few file descriptors on its host, the first time."""

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        if first("limited"):
            raise OutOfFileDescriptors("expected 17 more file descriptors, got 3")
        await super().run(outbox)


def limited() -> Limited:
    return Limited(20)


@dataclass(frozen=True)
class Suspended(Sample):
    """Suspends its process after a group, the first time."""

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        if first("suspended"):
            await outbox.send(group(instance_id="doomed"))
            os.kill(os.getpid(), signal.SIGSTOP)
        await super().run(outbox)


def suspended() -> Suspended:
    return Suspended(20)


@dataclass(frozen=True)
class Forge(Sample):
    """Breaks the protocol of the channel, the first time."""

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        if first("forged"):
            outbox._end._connection.send(wire.close(3))  # type: ignore[attr-defined]
            await anyio.sleep_forever()
        await super().run(outbox)


def forging() -> Forge:
    return Forge(20)


def blocking() -> SourceEnv:
    """Sample 20 prompts; the first worker blocks its event loop."""
    return after(wait_for_the_kernel)


def closing() -> SourceEnv:
    """Sample 20 prompts; the first worker closes its file descriptors."""
    return after(close_descriptors)


def after(way: Callable[[], None]) -> SourceEnv:
    """Sample 20 prompts after `way` was taken by a worker."""

    def make_env() -> Blocking:
        return Blocking(way if first(way.__name__) else None)

    return SourceEnv(make_env, NoOpPolicy(), group_size=1, groups=20, concurrency=1, rollout_timeout_s=1)


def two() -> SourceEnv:
    """Sample two prompts, both of which wait."""
    return SourceEnv(partial(Rollouts, 0), NoOpPolicy(), group_size=GROUP_SIZE, groups=2, concurrency=4)


@dataclass(frozen=True)
class ReadNothing(Sample):
    """Raises what also a connection that cannot be made would."""

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        await super().run(outbox)
        raise FileNotFoundError("expected a file of prompts, got none")


def reading_nothing() -> ReadNothing:
    return ReadNothing(1)
