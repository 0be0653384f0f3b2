"""One receiver with many senders: memory, processor time, fairness, and their return when it is killed and restarted.

    python -m benchmarks.many_senders --senders 10 100 1000 4000

The senders are connections of `connect_with_replay` in a few processes, the receiver is a process of its own, all with
as many file descriptors as the hard limit permits. Every record is small, so that costs of records hardly count. After
the restart everything that was sent must have arrived: the script exits with 1 if a record is unsaved.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import anyio
import msgspec
from rich.console import Console

from penstock import TrajectoryGroup
from penstock.channels import ReplayingSender, connect_with_replay, serve
from penstock.testing import group

from .contestants import leaving_nothing
from .machine import cpu_seconds, resident_mb
from .report import command_line, count, print_table, write_json

__all__ = ["main"]

BY_PROCESS = 2500
"""Senders in one process: each has 4 file descriptors, and 7 while it connects."""

DEADLINE_S = 300.0


@dataclass
class Child:
    """A process that is commanded through a pipe."""

    process: SpawnProcess
    pipe: Connection

    @classmethod
    def start(cls, work: Callable[..., Any], *arguments: object) -> Child:
        """Start `work`, which gets the other end of the pipe and the arguments."""
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=work, args=(theirs, *arguments), daemon=True)
        process.start()
        return cls(process, ours)

    def ask(self, command: str) -> Any:
        """Send a command, and return its answer."""
        self.pipe.send(command)
        return self.answer()

    def answer(self) -> Any:
        """Return the next answer."""
        if not self.pipe.poll(DEADLINE_S):
            raise TimeoutError(f"expected an answer of process {self.process.pid} within {DEADLINE_S} s")
        return self.pipe.recv()

    @property
    def cpu_s(self) -> float:
        """Processor time so far."""
        return cpu_seconds([self.process.pid or 0])


def raise_limit() -> None:
    """Permit this process as many open files as its hard limit does."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def resources() -> tuple[float, int]:
    """Return the resident memory of this process in MB, and its open descriptors."""
    gc.collect()
    return resident_mb("VmRSS"), len(list(Path("/proc/self/fd").iterdir()))


# -- the receiver ------------------------------------------------------------------------------------------------------


class Saved:
    """Reports every record as saved, as a checkpoint after it would."""

    def received(self, peer: Any, record: TrajectoryGroup) -> TrajectoryGroup:
        """See `PeerListener`."""
        peer.ended(record.id, 1, "saved", 1)
        return record

    def observed(self, peer: Any, payload: bytes) -> None:
        """See `PeerListener`."""

    def lost(self, peer: Any, error: Exception) -> None:
        """See `PeerListener`."""

    def closed(self, peer: Any) -> None:
        """See `PeerListener`."""

    def disconnected(self, peer: Any) -> None:
        """See `PeerListener`."""


def receive(pipe: Connection, url: str, senders: int) -> None:
    """Receive in this process; answer `resources`, `senders` and `counts`: the records of each since the last time."""
    raise_limit()
    anyio.run(_receive, pipe, url, senders)


async def _receive(pipe: Connection, url: str, senders: int) -> None:
    counts = Counter[str]()
    async with (
        serve(url, TrajectoryGroup, max_senders=senders + 1, capacity=4, listener=Saved()) as inbox,
        anyio.create_task_group() as tasks,
    ):
        inbox.keep_open()

        async def count_records() -> None:
            async for record in inbox:
                counts[record.env] += 1

        tasks.start_soon(count_records)
        pipe.send(resources())
        while True:
            await anyio.wait_readable(pipe.fileno())
            command = pipe.recv()
            if command == "senders":
                pipe.send(len(inbox.peers))
            elif command == "resources":
                pipe.send(resources())
            else:
                pipe.send(dict(counts))
                counts.clear()


# -- the senders -------------------------------------------------------------------------------------------------------


def send(pipe: Connection, url: str, first: int, number: int) -> None:
    """Hold `number` senders in this process; obey `resources`, `go`, `stop` and `unsaved`."""
    raise_limit()
    with suppress(EOFError):
        anyio.run(_send, pipe, url, range(first, first + number))


async def _send(pipe: Connection, url: str, names: range) -> None:
    outboxes: dict[int, ReplayingSender] = {}
    all_open = anyio.Event()

    async def hold(name: int) -> None:
        async with connect_with_replay(url, name=str(name)) as outbox:
            outboxes[name] = outbox
            if len(outboxes) == len(names):
                all_open.set()
            await anyio.sleep_forever()

    pipe.send(resources())
    async with anyio.create_task_group() as tasks:
        for name in names:
            tasks.start_soon(hold, name)
        await all_open.wait()
        while True:
            await anyio.wait_readable(pipe.fileno())
            command = pipe.recv()
            if command == "go":
                await _load(pipe, outboxes)
            elif command == "resources":
                pipe.send(resources())
            else:
                while unsaved := sum(outbox.unsaved for outbox in outboxes.values()):  # noqa: ASYNC110 (no event of it)
                    await anyio.sleep(0.05)
                pipe.send(unsaved)


async def _load(pipe: Connection, outboxes: dict[int, ReplayingSender]) -> None:
    """Send from every sender until the next command; answer the records that were sent."""
    sent, record = 0, group(completion_lengths=[2])

    async def send_on(name: int, outbox: ReplayingSender) -> None:
        nonlocal sent
        number = 0
        while True:
            instance_id = f"{time.monotonic_ns()}-{number}"
            await outbox.send(msgspec.structs.replace(record, env=str(name), instance_id=instance_id))
            number, sent = number + 1, sent + 1

    async with anyio.create_task_group() as tasks:
        for name, outbox in outboxes.items():
            tasks.start_soon(send_on, name, outbox)
        await anyio.wait_readable(pipe.fileno())
        pipe.recv()
        tasks.cancel_scope.cancel()
    pipe.send(sent)


# -- measurements ------------------------------------------------------------------------------------------------------


def until_connected(receiver: Child, senders: int) -> float:
    """Return the seconds until all are connected."""
    began = time.perf_counter()
    while (connected := receiver.ask("senders")) < senders:
        if time.perf_counter() - began > DEADLINE_S:
            raise TimeoutError(f"expected {senders} senders, got {connected}")
        time.sleep(0.05)
    return time.perf_counter() - began


def shares(children: list[Child], seconds: float) -> float:
    """Return the processor time of these processes in the next `seconds`, as a share of a core."""
    before, began = sum(child.cpu_s for child in children), time.perf_counter()
    time.sleep(seconds)
    return (sum(child.cpu_s for child in children) - before) / (time.perf_counter() - began)


def measure(senders: int, seconds: float) -> dict[str, Any]:
    """Return all measurements with this number of senders."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    receiver = Child.start(receive, url, senders)
    memory, descriptors = receiver.answer()
    numbers = range(0, senders, BY_PROCESS)
    children = [Child.start(send, url, first, min(BY_PROCESS, senders - first)) for first in numbers]
    try:
        memory_before = [child.answer()[0] for child in children]
        connected_s = until_connected(receiver, senders)
        with_memory, with_descriptors = receiver.ask("resources")
        of_senders = [child.ask("resources") for child in children]
        idle, idle_senders = shares([receiver], seconds), shares(children, seconds)
        loaded = _loaded(receiver, children, senders, seconds)
        for child in children:
            child.pipe.send("go")
        time.sleep(1)
        receiver.process.kill()
        receiver.process.join()
        receiver = Child.start(receive, url, senders)
        receiver.answer()
        returned_s = until_connected(receiver, senders)
        for child in children:
            child.ask("stop")
        unsaved = sum(child.ask("unsaved") for child in children)
    finally:
        for child in [receiver, *children]:
            child.process.kill()
            child.process.join()
    return {
        "senders": senders,
        "connected_s": connected_s,
        "receiver_kb": 1024 * (with_memory - memory) / senders,
        "receiver_descriptors": (with_descriptors - descriptors) / senders,
        "sender_kb": 1024 * (sum(mb for mb, _ in of_senders) - sum(memory_before)) / senders,
        "sender_descriptors": sum(fds for _, fds in of_senders) / senders,
        "idle_receiver": idle,
        "idle_senders": idle_senders,
        "returned_s": returned_s,
        "unsaved": unsaved,
    } | loaded


def _loaded(receiver: Child, children: list[Child], senders: int, seconds: float) -> dict[str, Any]:
    """Return the rate, the cost and the fairness while all senders send."""
    for child in children:
        child.pipe.send("go")
    time.sleep(1)
    receiver.ask("counts")
    before, began = receiver.cpu_s, time.perf_counter()
    time.sleep(seconds)
    counts = receiver.ask("counts")
    took, cpu = time.perf_counter() - began, receiver.cpu_s - before
    for child in children:
        child.ask("stop")
    by_sender = [counts.get(str(name), 0) for name in range(senders)]
    records = sum(by_sender)
    return {
        "records_s": records / took,
        "cpu_us": 1e6 * cpu / max(1, records),
        "fewest": min(by_sender),
        "median": statistics.median(by_sender),
        "most": max(by_sender),
    }


def main() -> None:
    """Run the command line."""
    parser = command_line(__doc__, seconds=5.0, repeats=1)
    parser.add_argument("--senders", type=count, nargs="+", default=[10, 100, 1000], help="numbers of senders")
    arguments = parser.parse_args()
    console, results = Console(width=120), []
    raise_limit()
    with leaving_nothing():
        for senders in arguments.senders:
            results.append(measure(senders, arguments.seconds))
            console.print({name: round(value, 3) for name, value in results[-1].items()}, highlight=False)
    _show(console, results)
    write_json(arguments.json, {"many_senders": results})
    sys.exit(any(result["unsaved"] for result in results))


def _show(console: Console, results: list[dict[str, Any]]) -> None:
    print_table(
        console,
        f"One receiver over tcp, {os.cpu_count()} cores",
        ["senders", "KB", "descriptors", "idle core", "records/s", "µs a record", "fewest/median/most", "back after s"],
        [
            [
                f"{each['senders']:,}",
                f"{each['receiver_kb']:.0f}",
                f"{each['receiver_descriptors']:.1f}",
                f"{each['idle_receiver']:.3f}",
                f"{each['records_s']:,.0f}",
                f"{each['cpu_us']:.0f}",
                f"{each['fewest']}/{each['median']:.0f}/{each['most']}",
                f"{each['returned_s']:.1f}",
            ]
            for each in results
        ],
    )


if __name__ == "__main__":
    main()
