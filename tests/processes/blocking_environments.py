"""Environments whose first worker blocks its event loop, each in another way; the worker after a restart does not."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import anyio
import numpy as np
from tests.fake_policy import completion_of

from penstock import SendChannel, TrajectoryGroup, current
from penstock.environments import RolloutResult
from penstock.testing import group


def spin() -> None:
    while True:
        time.sleep(0.001)  # it keeps the event loop, and no processor


def wait_for_the_kernel() -> None:
    time.sleep(600)


def keep_the_lock() -> None:
    ctypes.PyDLL(None).sleep(600)


def close_descriptors() -> None:
    os.closerange(3, 4096)


WAYS: list[Callable[[], None]] = [spin, wait_for_the_kernel, keep_the_lock]


@dataclass
class Blocking:
    """An environment of rollouts, of which the second one blocks the loop."""

    block: Callable[[], None] | None
    rollouts: int = 0

    async def rollout(self, task: int, repetition: int) -> RolloutResult:  # noqa: ARG002 (the protocol's)
        self.rollouts += 1
        if self.rollouts > 1 and self.block is not None:
            self.block()
            await anyio.sleep_forever()
        return RolloutResult(turns=[np.array([1], np.int32), completion_of("x")], reward=1.0)


@dataclass(frozen=True)
class Blocked:
    """A source that sends one group once the pipe at `path` was opened for writing, and does not yield before."""

    path: str

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        wait_for_pipe(self.path)
        await outbox.send(group())


def wait_for_pipe(path: str) -> None:
    """Wait without a call of a function in Python, whose frame would be the place."""
    os.close(os.open(path, os.O_RDONLY))


async def blocking() -> Blocking:
    """Return an environment that blocks in the way of its worker, in its first start."""
    worker = current().worker
    return Blocking(None if worker.restart else WAYS[worker.index])


async def closing() -> Blocking:
    worker = current().worker
    return Blocking(None if worker.restart else close_descriptors)
