"""What the processes of a cell have in common: a log that they all write, and the blow that one of them gets.

An actor is told nothing while it plays, except that the blow has fallen. All that it does is in the log, a line an
event, written at once: what was in the log when a process was killed had happened.
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
from penstock._pipeline.processes.supervisor import _Child
from penstock._schemas.control import Close, Closed
from penstock.accounting import Ledger
from penstock.errors import RunStopped
from penstock.testing import group

__all__ = [
    "Doomed",
    "Log",
    "Play",
    "Striker",
    "commit",
    "digest",
    "note_recovery",
    "number_of",
    "perform",
    "record_number",
]

LONGEST_LINE = 2000
"""Characters: a line that fits the pipe is written whole."""


class Doomed(Exception):
    """The blow, where it is an exception."""


def record_number(number: int) -> TrajectoryGroup:
    """Two trajectories of different lengths, other bytes for each number."""
    return group(completion_lengths=[30 + number % 7, 200], instance_id=str(number), seed=number)


def number_of(record: TrajectoryGroup) -> int:
    """Which record it is."""
    return int(record.instance_id)


def digest(record: TrajectoryGroup) -> str:
    """xxh3 of all that a record holds."""
    hashed = xxhash.xxh3_128()
    for name, column in sorted(record.columns().items()):
        hashed.update(f"{name} {column.dtype.str} {column.shape}".encode())
        hashed.update(column.tobytes())
    hashed.update(msgspec.msgpack.encode((record.env, record.instance_id, record.meta)))
    return hashed.hexdigest()


class Log:
    """What happens, as lines that several processes write: a word, and what belongs to it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __call__(self, word: str, *more: Any) -> None:
        """Write one line."""
        os.write(self.fd, msgspec.json.encode((word, *more))[:LONGEST_LINE] + b"\n")

    def told(self, what: object) -> None:
        """Someone learnt of somebody else's end."""
        self("told", time.monotonic(), str(what)[:500])

    def sent(self, record: TrajectoryGroup) -> None:
        """A record is about to be sent."""
        self("sent", number_of(record), digest(record))

    def committed(self, record: TrajectoryGroup) -> None:
        """A record was committed, which is still there to be read."""
        self("committed", number_of(record), digest(record))


class Striker:
    """Deals the blow, to the process that it is in."""

    def __init__(self, cell: Cell, log: Log) -> None:
        self.cell = cell
        self.log = log
        self.armed = False
        """Whether the next write, or the next goodbye, is the moment."""

    def strike(self) -> None:
        """Now."""
        self.armed = False
        self.log("struck", os.getpid(), time.monotonic())
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
                raise Doomed("struck")

    async def strike_here(self) -> None:
        """Now, in a stage: one that was told to stop does nothing more by itself."""
        self.strike()
        if self.cell.fault == "SIGTERM" and self.cell.role != "supervisor":
            await anyio.sleep_forever()

    async def send(self, outbox: SendChannel[TrajectoryGroup], record: TrajectoryGroup) -> None:
        """Send the record that is struck while it is written, or when it is published."""
        await checkpoint()  # what was sent before is in its slots now, and shares none with this one
        self.armed = self.cell.fault != "exception"
        await outbox.send(record)
        if self.cell.fault == "exception":
            self.strike()
        await checkpoint()  # it is written now
        if self.cell.fault == "SIGTERM":
            await anyio.sleep_forever()

    async def strike_when_idle(self) -> None:
        """When nobody in this process has anything to do."""
        await wait_all_tasks_blocked()
        await self.strike_here()

    async def strike_while_closing(self, end: SendChannel[Any] | ReceiveChannel[Any]) -> None:
        """When the other side has been told that `end` closes; an exception comes from whoever closed it."""
        self.armed = self.cell.fault != "exception"
        await end.aclose()
        if self.cell.fault == "exception":
            self.strike()

    def lie_in_wait(self) -> None:
        """Have this process struck, once armed, where a moment lies within penstock and not within an actor."""
        match self.cell:
            case Cell(moment="writing"):
                _patch(SegmentWriter, SegmentWriter.write, self._write)
            case Cell(moment="published"):
                _patch(SegmentWriter, SegmentWriter.publish, self._publish)
            case Cell(role="supervisor", moment="shutdown"):
                _patch(_Child, _Child.signal, self._signal)
            case Cell(moment="shutdown"):
                _patch(SenderConnection, SenderConnection.send, self._send)
                _patch(ControlConnection, ControlConnection.send, self._send_control)

    def _write(self, write: Callable[..., None], *arguments: Any, **options: Any) -> None:
        segment, span, contents, records, layout = arguments
        if self.armed:
            records = [self._struck_halfway(list(columns)) for columns in records]
        write(segment, span, contents, records, layout, **options)

    def _struck_halfway(self, columns: list[Any]) -> Iterator[Any]:
        yield from columns[: len(columns) // 2]
        self.strike()
        yield from columns[len(columns) // 2 :]

    def _publish(self, publish: Callable[..., None], *arguments: Any, **options: Any) -> None:
        publish(*arguments, **options)
        if self.armed:
            self.strike()

    def _signal(self, signal_child: Callable[..., None], child: Any, number: signal.Signals) -> None:
        signal_child(child, number)
        if self.armed and number == signal.SIGTERM:
            self.strike()

    def _send(self, send: Callable[..., None], connection: Any, message: Any) -> None:
        send(connection, message)
        if self.armed and isinstance(message, Close):
            self.strike()

    async def _send_control(
        self, send: Callable[..., Awaitable[None]], connection: Any, message: Any, *more: Any
    ) -> None:
        await send(connection, message, *more)
        if self.armed and isinstance(message, Closed):
            self.strike()


def commit(ledger: Ledger, record: TrajectoryGroup) -> None:
    """The optimizer step that used `record` is done."""
    ledger.take_over(record)
    ledger.commit(TrainBatch.pack([record]), ledger.step + 1)


def note_recovery(log: Log) -> None:
    """Have it logged how many records are found whose descriptors never came."""

    def around(recover: Callable[..., list[Any]], *arguments: Any) -> list[Any]:
        found = recover(*arguments)
        log("recovered", len(found))
        return found

    _patch(SlotReader, SlotReader.recover, around)


def _patch(owner: type, method: Callable[..., Any], around: Callable[..., Any]) -> None:
    """Have `around` called with a method of `owner` and its arguments instead of the method."""
    setattr(owner, method.__name__, lambda *arguments, **options: around(method, *arguments, **options))


@dataclass
class Play:
    """What every actor of a cell is given."""

    cell: Cell
    log: Log
    go: int
    """A descriptor that is readable from the moment on in which the blow has fallen."""
    url: tuple[int, int]
    """A pipe for the one URL that has to be told."""
    victim: int = 0
    """Process id of the one that is struck, as far as it is known from the beginning."""
    striker: Striker = field(init=False)

    def __post_init__(self) -> None:
        self.striker = Striker(self.cell, self.log)

    async def struck(self) -> None:
        """Wait until the blow has fallen, and a process that it stops stands still."""
        await _readable(os.dup(self.go))  # several may wait, each on a descriptor of its own

    async def gone(self) -> None:
        """Wait until the victim is no more."""
        await _readable(os.pidfd_open(self.victim))

    def tell_url(self, url: str) -> None:
        """For `hear_url` in the other process."""
        os.write(self.url[1], url.encode())

    async def hear_url(self) -> str:
        """What the other process told."""
        await anyio.wait_readable(self.url[0])
        return os.read(self.url[0], 1000).decode()


async def _readable(fd: int) -> None:
    """Wait until `fd` is readable, and close it."""
    try:
        await anyio.wait_readable(fd)
    finally:
        os.close(fd)


def perform(play: Play, act: Callable[[Play], Awaitable[None]]) -> int:
    """Run an actor, log what it leaves in its own process when it ends by itself, and return its exit status."""
    structlog.configure(processors=[_died_told_to(play.log)])
    signal.signal(signal.SIGUSR1, lambda *_: _print_waits())
    before, status = _descriptors(), 0
    try:
        anyio.run(act, play)
    except RunStopped as stopped:
        status = 128 + stopped.by
    except Exception as error:  # noqa: BLE001 (it ends here)
        traceback.print_exc()
        _forget(error)
        status = 1
    for thread in set(threading.enumerate()) - {threading.current_thread()}:
        thread.join()  # each is about to end, and may hold what it worked on last
    gc.collect()
    zmq_context().term()  # hangs while a socket is open
    play.log("left", sorted(_descriptors() - before))
    return status


def _forget(error: BaseException) -> None:
    """An exception keeps the frames that it passed, and they the records that they held."""
    traceback.clear_frames(error.__traceback__)
    for inner in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        _forget(inner)


def _died_told_to(log: Log) -> Callable[..., Any]:
    def note(_: Any, __: str, event: dict[str, Any]) -> Any:
        if event["event"] == "worker_died":
            log.told(event["how"])
        elif event["event"] in {"worker_killed", "worker_exit_timeout", "close_timeout"}:
            log("warned", event["event"])
        raise structlog.DropEvent

    return note


def _print_waits() -> None:
    """What everyone waits for, for a cell that misses its deadline."""
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
