"""Stages that run in actors of Ray."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass

import anyio
import numpy as np
from msgspec.structs import replace

from penstock import SendChannel, TrajectoryGroup, current
from penstock.testing import group


@dataclass(frozen=True)
class SampleForever:
    """Never ends by itself; writes a file when its stage was cancelled."""

    farewell: str = ""

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        worker, number = current().worker, 0
        try:
            while True:
                await outbox.send(group(instance_id=f"{number}.{worker.index}.{worker.restart}"))
                number += 1
                await anyio.sleep(0.001)
        finally:
            if self.farewell:
                with open(f"{self.farewell}.{worker.index}", "w") as file:  # noqa: ASYNC230, PTH123
                    file.write("cancelled")


@dataclass(frozen=True)
class Raises:
    """Raises after one group."""

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        await outbox.send(group(instance_id="first"))
        raise ValueError("expected water, got sand")


@dataclass(frozen=True)
class InTheMainThread:
    """Sends one group whose rewards tell what works where a stage runs: 1 where it does."""

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        rewards = [
            threading.current_thread() is threading.main_thread(),
            _handles_signals(),
            _verifies_math(),
            _maps_a_data_set(),
        ]
        sampled = group(completion_lengths=[2] * len(rewards))
        await outbox.send(replace(sampled, rewards=np.array(rewards, np.float32)))


def _handles_signals() -> bool:
    handled = []
    before = signal.signal(signal.SIGUSR1, lambda *_: handled.append(True))
    os.kill(os.getpid(), signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)
    return handled == [True]


def _verifies_math() -> bool:
    from math_verify import parse, verify  # noqa: PLC0415 (slow)

    return bool(verify(parse("$1/2$"), parse("$0.5$")))  # it bounds its time by SIGALRM


def _maps_a_data_set() -> bool:
    from datasets import Dataset  # noqa: PLC0415 (slow)

    rows = Dataset.from_list([{"number": number} for number in range(4)])
    mapped = rows.map(lambda row: {"number": row["number"] + 1})  # a bar of tqdm, with a lock
    return bool(mapped["number"][:] == [1, 2, 3, 4])
