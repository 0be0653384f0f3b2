"""Cost of the shm channel besides time: processor, memory, and the effect of more producers than cores.

python -m benchmarks.cost
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import anyio
import msgspec
from rich.console import Console

from penstock import ReceiveChannel, TrajectoryGroup
from penstock.channels import connect, serve
from penstock.records import Packer

from .contestants import Case, leaving_nothing
from .contestants.harness import DEADLINE_S, Control, producing
from .contestants.penstock import penstock, produce
from .machine import cpu_seconds, pss_bytes
from .records import batch_tokens, make_groups
from .report import command_line, median_of, print_table, short, write_json

__all__ = ["main"]

PACED = 10_000
"""Rate in trajectories a second at which processor time is measured."""

SLOTS = 1000
SLOT_TOKENS = 960
"""Four 4-byte columns and a mask over so many tokens make a record of 16.7 KB."""

SLOT_BYTES = 17 * 1024
"""Bytes of a segment that such a record takes."""

SETTLE_S = 1.0
"""Pause before the measurement begins."""


# -- processor -------------------------------------------------------------------------------------------------------


async def cpu_when_idle(producers: int, seconds: float) -> float:
    """Return the share of a core of all ends of an idle channel together, less the cost of measuring."""
    share, measuring = math.nan, await _cpu_share([os.getpid()], seconds)
    async with serve("shm://", TrajectoryGroup, senders=producers) as inbox:
        pipes = [multiprocessing.get_context("spawn").Pipe() for _ in range(producers)]
        arguments = [(inbox.url, theirs) for _, theirs in pipes]
        with anyio.fail_after(DEADLINE_S), producing(_send_one_and_wait, arguments) as processes:
            for _ in range(producers):
                await inbox.receive()
            pids = [os.getpid(), *(process.pid or 0 for process in processes)]
            share = await _cpu_share(pids, seconds)
            for ours, _ in pipes:
                ours.send(None)
            async for _ in inbox:
                pass
    return share - measuring


def _send_one_and_wait(url: str, pipe: Connection) -> None:
    anyio.run(_send_one_and_wait_async, url, pipe)


async def _send_one_and_wait_async(url: str, pipe: Connection) -> None:
    async with connect(url, TrajectoryGroup, name=f"process {os.getpid()}") as outbox:
        await outbox.send(make_groups(0, group=1, tokens=1)[0])
        await anyio.wait_readable(pipe.fileno())


async def cpu_when_paced(case: Case) -> float:
    """Return the share of a core of all ends together at a paced load; the receiver packs the groups."""
    control, share = Control(case.producers), math.nan
    async with serve("shm://", TrajectoryGroup, senders=case.producers) as inbox:
        arguments = [(inbox.url, case, number, control) for number in range(case.producers)]
        with anyio.fail_after(case.seconds + DEADLINE_S), producing(produce, arguments) as processes:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_pack, inbox, case)
                while inbox.statistics().senders < case.producers:  # noqa: ASYNC110 (the channel has no event for it)
                    await anyio.sleep(SETTLE_S)
                pids = [os.getpid(), *(process.pid or 0 for process in processes)]
                share = await _cpu_share(pids, case.seconds)
                control.stop()
    return share


async def _pack(inbox: ReceiveChannel[TrajectoryGroup], case: Case) -> None:
    packer = Packer(batch_tokens(case.group, case.tokens))
    async for group in inbox:
        if not packer.fits(group):
            packer.pack()
        packer.add(group)
        del group


async def _cpu_share(pids: Sequence[int], seconds: float) -> float:
    """Return the share of `pids`, this process first, so that reading the times of the others is excluded."""
    await anyio.sleep(SETTLE_S)
    before, begin = cpu_seconds(reversed(pids)), anyio.current_time()
    await anyio.sleep(seconds)
    took = anyio.current_time() - begin
    return (cpu_seconds(pids) - before) / took


# -- memory ----------------------------------------------------------------------------------------------------------


async def memory(readers: int) -> dict[str, int]:
    """Return the growth of sender and receiver in bytes with a channel of which every slot is full and being read."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    async with serve("shm://", TrajectoryGroup, capacity=SLOTS, capacity_bytes=SLOTS * SLOT_BYTES) as inbox:
        with anyio.fail_after(DEADLINE_S), producing(_fill, [(inbox.url, theirs)]) as processes:
            pids = [os.getpid(), processes[0].pid or 0]
            await _wait_for(ours)
            before = pss_bytes(pids)
            ours.send(None)
            held: list[TrajectoryGroup] = []
            async with anyio.create_task_group() as tasks:
                for _ in range(readers):
                    tasks.start_soon(_hold, inbox, held)
            after = pss_bytes(pids)
            held.clear()
            ours.send(None)
            async for _ in inbox:
                pass
    return {name: after[name] - before[name] for name in after}


async def _hold(inbox: ReceiveChannel[TrajectoryGroup], held: list[TrajectoryGroup]) -> None:
    while len(held) < SLOTS:
        try:
            held.append(inbox.receive_nowait())
        except anyio.WouldBlock:
            await anyio.sleep(0.001)


async def _wait_for(pipe: Connection) -> None:
    await anyio.wait_readable(pipe.fileno())
    pipe.recv()


def _fill(url: str, pipe: Connection) -> None:
    anyio.run(_fill_async, url, pipe)


async def _fill_async(url: str, pipe: Connection) -> None:
    groups = make_groups(0, group=1, tokens=SLOT_TOKENS)
    pipe.send(None)
    await _wait_for(pipe)
    async with connect(url, TrajectoryGroup) as outbox:
        for number in range(SLOTS):
            await outbox.send(msgspec.structs.replace(groups[number % len(groups)], instance_id=str(number)))
        await _wait_for(pipe)


# -- all of it -------------------------------------------------------------------------------------------------------


def measure(seconds: float, repeats: int, console: Console) -> dict[str, Any]:
    """Run and print every measurement."""
    paced = Case(4, 8, 1024, seconds).paced(PACED)
    idle = [100 * anyio.run(cpu_when_idle, 4, seconds) for _ in range(repeats)]
    loaded = [100 * anyio.run(cpu_when_paced, paced) for _ in range(repeats)]
    rows = [["idle", median_of(idle, 2)], [f"{PACED:,} trajectories/s", median_of(loaded, 1)]]
    print_table(console, "processor: 4 producers and the receiver together", ("", "% of a core"), rows)

    growth = {readers: anyio.run(memory, readers) for readers in (1, 2, 4)}
    megabytes = [
        [str(readers), *(f"{grown[name] / 1e6:.2f}" for name in ("Pss_Shmem", "Pss"))]
        for readers, grown in growth.items()
    ]
    title = f"memory of {SLOTS:,} slots of 16.7 KB, all full and being read, both processes"
    print_table(console, title, ("readers", "shared MB", "with Python's MB"), megabytes)

    rates: dict[int, list[float]] = {}
    for _ in range(repeats):
        for producers in (1, 2, 4, 8):
            case = Case(producers, 8, 1024, seconds)
            rates.setdefault(producers, []).append(penstock(case).trajectories_per_s)
    best = max(statistics.median(each) for each in rates.values())
    lines = [
        [
            str(producers),
            short(statistics.median(each)),
            f"{short(min(each))}–{short(max(each))}",
            f"{statistics.median(each) / best:.2f}",
        ]
        for producers, each in rates.items()
    ]
    print_table(console, "groups of 8", ("producers", "traj/s", "min–max", "of best"), lines)
    return {
        "cpu_idle_percent": idle,
        "cpu_paced_percent": loaded,
        "memory_bytes": {str(readers): grown for readers, grown in growth.items()},
        "trajectories_per_s": {str(producers): each for producers, each in rates.items()},
    }


@leaving_nothing()
def main() -> None:
    """Parse the command line and run."""
    parser = command_line(__doc__, seconds=3.0, repeats=3)
    arguments = parser.parse_args()
    write_json(arguments.json, measure(arguments.seconds, arguments.repeats, Console()))


if __name__ == "__main__":
    main()
