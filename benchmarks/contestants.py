"""What can be measured: each contestant moves the same groups from producer processes into packed batches.

A contestant is a name and a function from a case to what was measured: see `CONTESTANTS`.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess

import anyio
import msgspec
import numpy as np

from penstock.pipeline.carriers import connect, serve
from penstock.pipeline.errors import PeerClosed, PeerLost
from penstock.schemas import Packer, TrajectoryGroup

from .records import check_batch, make_groups

__all__ = ["CONTESTANTS", "Case", "Measured"]

BATCH_TOKENS = 64 * 1024
"""Tokens of a packed batch."""

DISTINCT_GROUPS = 16
"""Groups that a producer sends in turn: built beforehand, for building is not transport."""

CHECK_WHOLE_EVERY = 64
"""Batches between two whose every value is checked; of the others the edges of each sequence are."""

WARM_UP_S = 0.5

PINGS = 1000


@dataclass(frozen=True)
class Case:
    """One setting of the benchmark."""

    producers: int
    group: int
    """Trajectories a group."""
    tokens: int
    """Tokens a trajectory."""
    seconds: float
    """How long to count."""


@dataclass(frozen=True)
class Measured:
    """What came of a case."""

    trajectories_per_s: float
    p50_us: float
    """One way, from `send` to the group in the receiver's hands, one group in flight."""
    p99_us: float


def penstock(case: Case) -> Measured:
    """The shm channel through its public API."""
    rate = anyio.run(_throughput, case)
    latencies = anyio.run(_latencies, case)
    p50, p99 = np.percentile(latencies, [50, 99])
    return Measured(rate, float(p50), float(p99))


CONTESTANTS: dict[str, Callable[[Case], Measured]] = {"penstock": penstock}


async def _throughput(case: Case) -> float:
    packer = Packer(max(BATCH_TOKENS, case.group * case.tokens))
    counted, batches, started = 0, itertools.count(), 0.0
    async with serve("shm://", TrajectoryGroup, senders=case.producers) as inbox:
        with _producers(_flood, case, inbox.url):
            begin = None
            async for group in inbox:
                if not packer.fits(group):
                    batch = packer.pack()
                    check_batch(batch, whole=next(batches) % CHECK_WHOLE_EVERY == 0)
                    now = time.perf_counter()
                    if begin is None:
                        begin = now if inbox.statistics().senders == case.producers else None
                    elif started:
                        counted += len(batch)
                        if now - started >= case.seconds:
                            return counted / (now - started)
                    elif now - begin > WARM_UP_S:
                        started = now
                packer.add(group)
    raise RuntimeError("the producers ended before the time was over")


async def _latencies(case: Case) -> list[float]:
    latencies: list[float] = []
    async with serve("shm://", TrajectoryGroup, capacity=1) as inbox:
        with _producers(_ping, case, inbox.url):
            async for group in inbox:
                latencies.append((time.monotonic_ns() - group.meta["sent_ns"]) / 1000)
                del group
    return latencies[len(latencies) // 10 :]


@contextmanager
def _producers(target: Callable[..., None], case: Case, url: str) -> Iterator[None]:
    count = 1 if target is _ping else case.producers
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = [
        context.Process(target=target, args=(url, case, n), daemon=True) for n in range(count)
    ]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _flood(url: str, case: Case, producer: int) -> None:
    anyio.run(_flood_async, url, case, producer)


async def _flood_async(url: str, case: Case, producer: int) -> None:
    groups = make_groups(producer, group=case.group, tokens=case.tokens, count=DISTINCT_GROUPS)
    async with connect(url, TrajectoryGroup) as outbox:
        try:
            for group in itertools.cycle(groups):
                await outbox.send(group)
        except (PeerClosed, PeerLost):
            return


def _ping(url: str, case: Case, producer: int) -> None:
    anyio.run(_ping_async, url, case, producer)


async def _ping_async(url: str, case: Case, producer: int) -> None:
    group = make_groups(producer, group=case.group, tokens=case.tokens, count=1)[0]
    async with connect(url, TrajectoryGroup) as outbox:
        for _ in range(PINGS):
            await anyio.sleep(0.001)
            await outbox.send(msgspec.structs.replace(group, meta={"sent_ns": time.monotonic_ns()}))
