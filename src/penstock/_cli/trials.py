"""Tiny runs through every kind of channel, for `penstock doctor`: records that arrive are compared with those sent."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import anyio

from .. import ReceiveChannel, SendChannel, TrajectoryGroup, current, here, processes, source
from .._pipeline.util.exception_groups import single_exception
from ..channels import connect, serve
from ..testing import group
from .findings import Finding
from .machine_checks import SEE_MESSAGE, WORKERS

RECORDS = 20

TIMEOUT_S = 60.0
"""Bound on one trial: a worker starts within seconds, also on a busy machine."""


class RecordsDiffer(AssertionError):
    """A record arrived that differs from the one that was sent."""


def sent(number: int) -> TrajectoryGroup:
    """Return record `number`, the same in every process."""
    return group(instance_id=str(number), seed=number)


def compare(received: list[TrajectoryGroup]) -> None:
    """Check that the records are those that were sent, bit for bit.

    Raises:
        RecordsDiffer: they are not.
    """
    if len(received) != RECORDS:
        raise RecordsDiffer(f"expected {RECORDS} records, got {len(received)}")
    for number, record in enumerate(received):
        pairs = zip(sent(number).columns().items(), record.columns().items(), strict=True)
        if any(a != b or x.tobytes() != y.tobytes() for (a, x), (b, y) in pairs):
            raise RecordsDiffer(f"expected record {number} as it was sent, got {record!r}")


@dataclass(frozen=True)
class Send:
    """Sends the records."""

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        """Run the source; see `Source`."""
        for number in range(RECORDS):
            await outbox.send(sent(number))


@dataclass(frozen=True)
class Keep:
    """Keeps a copy of each record."""

    received: list[TrajectoryGroup] = field(default_factory=list)

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        """Run the sink; see `Sink`."""
        async for record in inbox:
            self.received.append(record.owned())
            current().ledger.end(record, "trained")


async def _in_memory() -> list[TrajectoryGroup]:
    sink = Keep()
    await source(Send(), on=here()).sink(sink).run()
    return sink.received


async def _from_a_worker() -> list[TrajectoryGroup]:
    sink = Keep()
    await source(Send(), on=processes(1)).sink(sink).run()
    return sink.received


async def _over_tcp() -> list[TrajectoryGroup]:
    received: list[TrajectoryGroup] = []
    async with serve("tcp://127.0.0.1:0", TrajectoryGroup) as inbox, anyio.create_task_group() as tasks:
        tasks.start_soon(_send_to, inbox.url)
        received.extend([record.owned() async for record in inbox])
    return received


async def _send_to(url: str) -> None:
    async with connect(url, TrajectoryGroup) as outbox:
        await Send().run(outbox)


Trial = Callable[[], Awaitable[list[TrajectoryGroup]]]


def trials() -> list[Finding]:
    """Run the tiny runs, and return their findings."""
    return [
        _tried("run in memory", _in_memory, "no run will work"),
        _tried("run over shm", _from_a_worker, WORKERS),
        _tried("run over tcp", _over_tcp, "tcp:// channels will not work", needed=False),
    ]


def _tried(name: str, trial: Trial, affects: str, *, needed: bool = True) -> Finding:
    began = time.monotonic()

    async def bounded() -> list[TrajectoryGroup]:
        with anyio.fail_after(TIMEOUT_S):
            return await trial()

    try:
        compare(anyio.run(bounded))
    except Exception as raised:  # noqa: BLE001 (whatever it is, it is the finding)
        error = single_exception(raised)
        found = f"{type(error).__name__}: {str(error) or f'not done within {TIMEOUT_S:g} s'}"
        return Finding(name, found, "fails" if needed else "note", affects, SEE_MESSAGE)
    return Finding(name, f"{RECORDS} records arrived as they were sent, {time.monotonic() - began:.2f} s")
