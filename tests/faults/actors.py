"""The parts that all processes of a cell use: a log that they all write, and the injection of the fault into one.

While an actor runs, it learns only that the fault was injected. Each of its actions is a line in the log, written at
once: an action that is in the log of a killed process had happened.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import msgspec
import structlog
import xxhash
from anyio import wait_all_tasks_blocked
from anyio.lowlevel import checkpoint
from tests.faults.cells import Cell

from penstock import ReceiveChannel, SendChannel, TrainBatch, TrajectoryGroup
from penstock._pipeline.channels.control_connection import ControlConnection
from penstock._pipeline.channels.remote_sender import SenderConnection
from penstock._pipeline.channels.segment import SegmentWriter
from penstock._pipeline.channels.shm import SlotReader
from penstock._pipeline.channels.zmq_context import zmq_context
from penstock._pipeline.workers.worker_process import WorkerProcess
from penstock._schemas.control import Close, Closed
from penstock.accounting import Ledger
from penstock.errors import RunStopped
from penstock.testing import group

__all__ = [
    "FaultInjector",
    "InjectedError",
    "Log",
    "Setup",
    "commit",
    "digest",
    "note_recovery",
    "number_of",
    "record_number",
    "run_actor",
]

LONGEST_LINE = 2000
"""Characters: a line that fits the pipe is written whole."""


class InjectedError(Exception):
    """The fault, where it is an exception."""


def record_number(number: int) -> TrajectoryGroup:
    """Return two trajectories of different lengths, with other bytes for each number."""
    return group(completion_lengths=[30 + number % 7, 200], instance_id=str(number), seed=number)


def number_of(record: TrajectoryGroup) -> int:
    """Return the number of a record."""
    return int(record.instance_id)


def digest(record: TrajectoryGroup) -> str:
    """Return the xxh3 of all fields of a record."""
    hashed = xxhash.xxh3_128()
    for name, column in sorted(record.columns().items()):
        hashed.update(f"{name} {column.dtype.str} {column.shape}".encode())
        hashed.update(column.tobytes())
    hashed.update(msgspec.msgpack.encode((record.env, record.instance_id, record.meta)))
    return hashed.hexdigest()


class Log:
    """A log of events, as lines that several processes write: a word, and its values."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __call__(self, word: str, *more: Any) -> None:
        """Write one line."""
        os.write(self.fd, msgspec.json.encode((word, *more))[:LONGEST_LINE] + b"\n")

    def noticed(self, what: object) -> None:
        """Log that an actor noticed the end of another process."""
        self("noticed", time.monotonic(), str(what)[:500])

    def sent(self, record: TrajectoryGroup) -> None:
        """Log that a record is about to be sent."""
        self("sent", number_of(record), digest(record))

    def committed(self, record: TrajectoryGroup) -> None:
        """Log that a record was committed; it can still be read."""
        self("committed", number_of(record), digest(record))


class FaultInjector:
    """Injects the fault of a cell into the process that it is in."""

    def __init__(self, cell: Cell, log: Log) -> None:
        self.cell = cell
        self.log = log
        self.armed = False
        """True if the next write, or the next Close, is the moment."""

    def inject(self) -> None:
        """Inject the fault now."""
        self.armed = False
        self.log("injected", os.getpid(), time.monotonic())
        match self.cell.fault:
            case "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
            case "SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)
            case "stall" | "zombie":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "_exit":
                os._exit(3)
            case "exception":
                raise InjectedError("injected")

    async def inject_here(self) -> None:
        """Inject the fault now, in a stage, which does nothing more after SIGTERM."""
        self.inject()
        if self.cell.fault == "SIGTERM" and self.cell.role != "supervisor":
            await anyio.sleep_forever()

    async def send(self, outbox: SendChannel[TrajectoryGroup], record: TrajectoryGroup) -> None:
        """Send the record whose writing or publication is the moment."""
        await checkpoint()  # earlier records are in their slots now, and share none with this one
        self.armed = self.cell.fault != "exception"
        await outbox.send(record)
        if self.cell.fault == "exception":
            self.inject()
        await checkpoint()  # it is written now
        if self.cell.fault == "SIGTERM":
            await anyio.sleep_forever()

    async def inject_when_idle(self) -> None:
        """Inject the fault when all tasks of this process are blocked."""
        await wait_all_tasks_blocked()
        await self.inject_here()

    async def inject_while_closing(self, end: SendChannel[Any] | ReceiveChannel[Any]) -> None:
        """Inject the fault when `end` has sent Close; an exception is raised after it is closed."""
        self.armed = self.cell.fault != "exception"
        await end.aclose()
        if self.cell.fault == "exception":
            self.inject()

    def patch_moments(self) -> None:
        """Patch the methods of penstock in which a moment lies, so that they inject the fault once armed."""
        match self.cell:
            case Cell(moment="writing"):
                _patch(SegmentWriter, SegmentWriter.write, self._write)
            case Cell(moment="published"):
                _patch(SegmentWriter, SegmentWriter.publish, self._publish)
            case Cell(role="supervisor", moment="shutdown"):
                _patch(WorkerProcess, WorkerProcess.signal, self._signal)
            case Cell(moment="shutdown"):
                _patch(SenderConnection, SenderConnection.send, self._send)
                _patch(ControlConnection, ControlConnection.send, self._send_control)

    def _write(self, write: Callable[..., None], *arguments: Any, **options: Any) -> None:
        segment, span, contents, records, layout = arguments
        if self.armed:
            records = [self._injected_halfway(list(columns)) for columns in records]
        write(segment, span, contents, records, layout, **options)

    def _injected_halfway(self, columns: list[Any]) -> Iterator[Any]:
        yield from columns[: len(columns) // 2]
        self.inject()
        yield from columns[len(columns) // 2 :]

    def _publish(self, publish: Callable[..., None], *arguments: Any, **options: Any) -> None:
        publish(*arguments, **options)
        if self.armed:
            self.inject()

    def _signal(self, signal_child: Callable[..., None], child: Any, number: signal.Signals) -> None:
        signal_child(child, number)
        if self.armed and number == signal.SIGTERM:
            self.inject()

    def _send(self, send: Callable[..., None], connection: Any, message: Any) -> None:
        send(connection, message)
        if self.armed and isinstance(message, Close):
            self.inject()

    async def _send_control(
        self, send: Callable[..., Awaitable[None]], connection: Any, message: Any, *more: Any
    ) -> None:
        await send(connection, message, *more)
        if self.armed and isinstance(message, Closed):
            self.inject()


def commit(ledger: Ledger, record: TrajectoryGroup) -> None:
    """Commit `record`, as after an optimizer step with it."""
    ledger.hand_over(record)
    ledger.commit(TrainBatch.pack([record]), ledger.step + 1)


def note_recovery(log: Log) -> None:
    """Log the number of records that are recovered without their descriptors."""

    def around(recover: Callable[..., list[Any]], *arguments: Any) -> list[Any]:
        found = recover(*arguments)
        log("recovered", len(found))
        return found

    _patch(SlotReader, SlotReader.recover, around)


def _patch(owner: type, method: Callable[..., Any], around: Callable[..., Any]) -> None:
    """Replace a method of `owner`: `around` is called with the method and its arguments."""
    setattr(owner, method.__name__, lambda *arguments, **options: around(method, *arguments, **options))


@dataclass
class Setup:
    """The arguments of every actor of a cell."""

    cell: Cell
    log: Log
    injected_reader: int
    """A descriptor that is readable once the fault was injected."""
    url: tuple[int, int]
    """A pipe for the URL of the channel."""
    victim: int = 0
    """Process id of the victim, if it is known from the beginning."""
    injector: FaultInjector = field(init=False)

    def __post_init__(self) -> None:
        self.injector = FaultInjector(self.cell, self.log)

    async def injected(self) -> None:
        """Wait until the fault was injected, and a process that it stops is stopped."""
        await _readable(os.dup(self.injected_reader))  # several may wait, each on a descriptor of its own

    async def victim_ended(self) -> None:
        """Wait until the victim has ended."""
        await _readable(os.pidfd_open(self.victim))

    def send_url(self, url: str) -> None:
        """Send the URL to `receive_url` in the other process."""
        os.write(self.url[1], url.encode())

    async def receive_url(self) -> str:
        """Return the URL that the other process sends."""
        await anyio.wait_readable(self.url[0])
        return os.read(self.url[0], 1000).decode()


async def _readable(fd: int) -> None:
    """Wait until `fd` is readable, and close it."""
    try:
        await anyio.wait_readable(fd)
    finally:
        os.close(fd)


def run_actor(setup: Setup, act: Callable[[Setup], Awaitable[None]]) -> int:
    """Run an actor, log the descriptors that it leaves when it ends by itself, and return its exit status."""
    structlog.configure(processors=[_log_deaths_to(setup.log)])
    signal.signal(signal.SIGUSR1, lambda *_: _print_waits())
    before, status = _descriptors(), 0
    try:
        anyio.run(act, setup)
    except RunStopped as stopped:
        status = 128 + stopped.by
    except Exception as error:  # noqa: BLE001 (it ends here)
        traceback.print_exc()
        _forget(error)
        status = 1
    for thread in set(threading.enumerate()) - {threading.current_thread()}:
        thread.join()  # each is about to end, and may hold its last work
    gc.collect()
    zmq_context().term()  # hangs while a socket is open
    setup.log("left", sorted(_descriptors() - before))
    return status


def _forget(error: BaseException) -> None:
    """Clear the frames of an exception, which hold records."""
    traceback.clear_frames(error.__traceback__)
    for inner in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        _forget(inner)


def _log_deaths_to(log: Log) -> Callable[..., Any]:
    def note(_: Any, __: str, event: dict[str, Any]) -> Any:
        if event["event"] == "worker_died":
            log.noticed(event["how"])
        elif event["event"] in {"worker_killed", "worker_exit_timeout", "close_timeout"}:
            log("warned", event["event"])
        raise structlog.DropEvent

    return note


def _print_waits() -> None:
    """Print the waits of all tasks, for a cell that misses its deadline."""
    sys.stderr.write(f"\nprocess {os.getpid()} is in\n")
    with suppress(RuntimeError):
        for task in asyncio.all_tasks():
            task.print_stack(limit=4)


def _descriptors() -> set[str]:
    found: set[str] = set()
    for link in _links():
        with suppress(FileNotFoundError):
            found.add(f"{link.name} of {link.readlink()}")
    return found


def _links() -> Iterable[Path]:
    return Path("/proc/self/fd").iterdir()
