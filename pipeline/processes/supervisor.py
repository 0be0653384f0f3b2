"""Start, watch, restart and stop the processes of a stage; the parent's side.

A child is watched by a pidfd, which is readable as soon as the process ends and never denotes another process; only
processes that were started here are signalled. A child is stopped with SIGTERM, and after a deadline with SIGKILL. A
child that dies is restarted as often as its placement allows; one whose stage raised ends the run. The supervisor knows
processes; `WorkerAccounting` knows which trajectories they hold.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Self, TypeAlias, TypeVar

import anyio
import anyio.to_thread
import msgspec

from ..channels.socket_directory import sweep
from ..context import Worker
from ..errors import WorkerFailed
from ..exception_groups import first_exception
from ..outcome import SWALLOWED
from ..statistics import WorkerState, WorkerStatistics
from ..telemetry import get_logger
from .placement import Processes
from .worker import refuse_while_importing_main
from .worker_accounting import WorkerAccounting
from .worker_messages import (
    Connected,
    Failed,
    Finished,
    Serving,
    Starting,
    WorkerChannels,
    WorkerConfig,
    WorkerEvent,
    decode_events,
)
from .worker_payload import interpreter_command, write_payload

__all__ = ["Supervisor"]

log = get_logger("penstock.pipeline")

READ_BYTES = 64 * 1024

R = TypeVar("R")

Feed: TypeAlias = Callable[[str, str], Awaitable[None]]
"""What a middle stage's worker is fed with while it lives: (name of the worker, URL that it serves)."""


class _Child:
    """One process that was started here, until it has been reaped."""

    def __init__(self, config: WorkerConfig, popen: subprocess.Popen[bytes], events: int) -> None:
        self.config = config
        self.pid = popen.pid
        self.state: WorkerState = "starting"
        self.connected = False
        """Whether it has come so far that its stage began."""
        self.phase = "importing penstock"
        """What it does while it starts."""
        self.started = anyio.Event()
        """Set when its stage began; a middle stage's, when records may be sent to it."""
        self.finished = False
        """Whether its stage returned."""
        self.failure: Failed | None = None
        """What its stage raised."""
        self.done = anyio.Event()
        """Set when the stage returned or raised: the process is about to end."""
        self.serving = anyio.Event()
        """Set when records may be sent to `url`."""
        self.url = ""
        self.killed_because = ""
        """Why it was killed although it had not been told to stop; empty where it was not."""
        self._popen = popen
        self._pidfd = os.pidfd_open(popen.pid)
        self._events = events
        self._buffer = bytearray()
        os.set_blocking(events, False)

    @property
    def running(self) -> bool:
        """Return whether the process has not been reaped."""
        return self._popen.returncode is None

    async def exited(self) -> None:
        """Wait until the process is no more, and reap it."""
        if self.running:
            await anyio.wait_readable(self._pidfd)
            self._popen.poll()

    async def receive(self) -> None:
        """Take in what it says until it ends."""
        while self._read():
            await anyio.wait_readable(self._events)

    def receive_rest(self) -> None:
        """Take in what it said last."""
        while self._read():
            pass

    def _read(self) -> bool:
        """Take in what is there; returns whether there may be more later."""
        try:
            read = os.read(self._events, READ_BYTES)
        except BlockingIOError:
            return self.running
        self._buffer += read
        for event in decode_events(self._buffer):
            self._handle(event)
        return bool(read)

    def _handle(self, event: WorkerEvent) -> None:
        match event:
            case Starting(phase):
                self.phase = phase
            case Connected():
                self.state, self.connected = "running", True
                if not self.config.channels.inbox_kind:
                    self.started.set()
            case Serving(url):
                self.url = url
                self.serving.set()
                self.started.set()
            case Finished():
                self.finished = True
                self.done.set()
            case Failed():
                self.failure = event
                self.done.set()
                self.started.set()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process and to no other."""
        if self.running:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self, why: str) -> None:
        """It is of no more use."""
        if self.running:
            self.killed_because = why
            self.signal(signal.SIGKILL)

    async def stop(self, within_s: float) -> None:
        """Have it end: SIGTERM, a deadline, SIGKILL. Not to be cancelled."""
        with anyio.CancelScope(shield=True):
            self.signal(signal.SIGTERM)
            with anyio.move_on_after(within_s) as deadline:
                await self.exited()
            if deadline.cancelled_caught:
                log.warning("worker_killed", worker=self.config.name, pid=self.pid, waited_s=within_s)
                self.signal(signal.SIGKILL)
                await self.exited()

    @property
    def may_leave_sockets(self) -> bool:
        """Return whether the sockets that it served may still lie about."""
        return bool(self.config.channels.inbox_kind) and not self.finished and self.failure is None

    @property
    def how(self) -> str:
        """How it ended, for people."""
        who = f"{self.config.name} (pid {self.pid})"
        status = self._popen.returncode
        if self.finished:
            return f"{SWALLOWED}{who}"
        if self.failure is not None:
            return f"{who} {self.failure.error}"
        if self.killed_because and status == -signal.SIGKILL:  # else it was dying already, and only slow at it
            return f"{who} {self.killed_because}; it was killed"
        if status is not None and status < 0:
            return f"{who} was killed by {_signal_name(-status)}"
        return f"{who} exited with status {status} before its stage had returned"

    def close(self) -> None:
        """Let go of descriptors; the process must have been reaped."""
        os.close(self._pidfd)
        os.close(self._events)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has none
        return f"signal {number}"


class _Spawner:
    """Starts the processes of one stage. The stage is pickled once, into an anonymous file that every child inherits.

    It has a thread of its own: a child is killed when the thread that started it ends, so it must be one that stays.
    """

    def __init__(self, name: str, stage: object, channels: WorkerChannels) -> None:
        self._name = name
        self._stage = stage
        self._channels = channels
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock starter")
        self._payload = -1

    async def __aenter__(self) -> Self:
        self._payload = await self._in_thread(write_payload, self._stage)
        return self

    async def __aexit__(self, *_: object) -> None:
        os.close(self._payload)
        self._thread.shutdown(wait=False)

    async def start(self, name: str, worker: Worker, counters: int) -> _Child:
        """Start a process."""
        return _Child(*await self._in_thread(self._popen, name, worker, counters))

    async def _in_thread(self, function: Callable[..., R], *arguments: Any) -> R:
        """Call a function that blocks. Not to be cancelled: a child that was started is never forgotten."""
        future = asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
        with anyio.CancelScope(shield=True):
            await asyncio.wait([future])
        return future.result()

    def _popen(self, name: str, worker: Worker, counters: int) -> tuple[WorkerConfig, subprocess.Popen[bytes], int]:
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        try:
            config = WorkerConfig(
                name=name,
                stage=self._name,
                worker=worker,
                channels=self._channels,
                parent=os.getpid(),
                payload=self._payload,
                counters=counters,
                events=write_end,
            )
            popen = subprocess.Popen(  # noqa: S603 (this very interpreter)
                interpreter_command("penstock._pipeline.processes.worker", msgspec.json.encode(config).decode()),
                stdin=subprocess.DEVNULL,
                pass_fds=(config.payload, config.counters, config.events),
                process_group=0,
            )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        return config, popen, read_end


class Supervisor:
    """The workers of one stage."""

    def __init__(self, name: str, stage: object, on: Processes, accounting: WorkerAccounting) -> None:
        self._name = name
        self._stage = stage
        self._on = on
        self._accounting = accounting
        self._children: dict[int, _Child] = {}
        """The last process of each worker, by index."""

    def statistics(self) -> tuple[WorkerStatistics, ...]:
        """Return the workers now."""
        return tuple(self._statistics(index) for index in range(self._on.count))

    def _statistics(self, index: int) -> WorkerStatistics:
        child = self._children.get(index)
        return WorkerStatistics(
            name=self._name_of(index),
            pid=child.pid if child else None,
            state=child.state if child else "starting",
            restarts=child.config.worker.restart if child else 0,
            starting=child.phase if child and child.state == "starting" else "",
        )

    def _name_of(self, index: int, restart: int = 0) -> str:
        restarted = f", restart {restart}" if restart else ""
        return f"{self._name} {index + 1}/{self._on.count}{restarted}"

    def kill(self, worker: str, why: str) -> None:
        """`worker` is there, and of no more use: it is killed, and replaced as often as that is allowed."""
        for child in self._children.values():
            if child.config.name == worker:
                child.kill(why)

    async def run(self, channels: WorkerChannels, feed: Feed | None = None) -> None:
        """Run the workers until the stage has returned in all of them.

        Args:
            channels: what the workers are connected to.
            feed: sends records to a worker that serves an inbox of its own.

        Raises:
            WorkerFailed: the stage raised in a worker, or a worker died more often than it may be restarted.
        """
        refuse_while_importing_main()
        try:
            async with (
                _Spawner(self._name, self._stage, channels) as spawner,
                anyio.create_task_group() as tasks,
            ):
                for index in range(self._on.count):
                    tasks.start_soon(self._run_with_restarts, spawner, index, feed)
        except BaseExceptionGroup as group:
            raise first_exception(group, WorkerFailed) from None

    async def _run_with_restarts(self, spawner: _Spawner, index: int, feed: Feed | None) -> None:
        """Run one worker until its stage returns."""
        restart = 0
        while True:
            child = await self._run_once(spawner, Worker(index, self._on.count, restart), feed)
            if child.finished:
                return
            if child.failure is not None:
                raise WorkerFailed(f"{child.how}\n\nIn the worker:\n\n{child.failure.traceback}")
            log.warning("worker_died", how=child.how, restarts_left=self._on.restarts - restart)
            if restart == self._on.restarts:
                raise WorkerFailed(f"{child.how}; it was to be started anew {self._on.restarts} times at most")
            restart += 1

    async def _run_once(self, spawner: _Spawner, worker: Worker, feed: Feed | None) -> _Child:
        """Start one process, and wait until it has ended and its exit is accounted for."""
        child = await self._start(spawner, worker)
        try:
            await self._watch(child, feed)
            self._accounting.ended(child.config.name, child.how, connected=child.connected)
        finally:
            child.close()
        return child

    async def _start(self, spawner: _Spawner, worker: Worker) -> _Child:
        name = self._name_of(worker.index, worker.restart)
        counters = self._accounting.open(name)
        try:
            child = await spawner.start(name, worker, counters)
        except BaseException:
            self._accounting.ended(name, f"{name} could not be started", connected=False)
            raise
        finally:
            os.close(counters)
        self._children[worker.index] = child
        log.info("worker_started", worker=name, pid=child.pid)
        return child

    async def _watch(self, child: _Child, feed: Feed | None) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(child.receive)
            tasks.start_soon(self._enforce_exit_deadline, child)
            tasks.start_soon(self._limit_start, child)
            if feed is not None:
                tasks.start_soon(self._feed, child, feed)
            try:
                await child.exited()
            finally:
                await self._stop(child)
                tasks.cancel_scope.cancel()

    async def _limit_start(self, child: _Child) -> None:
        """A process whose stage does not begin in time is killed."""
        limit_s = self._on.start_timeout_s
        with anyio.move_on_after(limit_s) as deadline:
            await child.started.wait()
        if deadline.cancelled_caught:
            child.kill(f"did not start within start_timeout_s={limit_s:g}, it was {child.phase}")

    async def _enforce_exit_deadline(self, child: _Child) -> None:
        """A process whose stage is done has to end in time."""
        await child.done.wait()
        await anyio.sleep(self._on.stop_timeout_s)
        log.warning("worker_exit_timeout", worker=child.config.name, pid=child.pid, waited_s=self._on.stop_timeout_s)
        child.signal(signal.SIGKILL)

    async def _feed(self, child: _Child, feed: Feed) -> None:
        await child.serving.wait()
        await feed(child.config.name, child.url)

    async def _stop(self, child: _Child) -> None:
        """Whatever happened: the process ends, and is remembered as what it was."""
        if child.running:
            child.state = "stopping"
            await child.stop(self._on.stop_timeout_s)
        child.receive_rest()
        if child.may_leave_sockets:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(sweep)
        if child.state == "stopping" or child.finished:
            child.state = "finished"
        else:
            child.state = "failed" if child.failure else "dead"
