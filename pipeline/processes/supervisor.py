"""Start, watch, restart and stop the processes of a stage; the parent's side.

A child is watched by a pidfd, which is readable as soon as the process ends and never refers to another process; only
processes that were started here are signalled. The supervisor knows processes; `WorkerAccounting` knows which
trajectories they hold. A worker passes through four phases:

1. Start: it is spawned, imports what its stage needs, and connects; one that takes too long is killed.
2. Run: it reports events, until its stage returns or raises, or the process dies.
3. Exit: a process whose stage is done must exit by a deadline; any other one is stopped with SIGTERM, and after a
   deadline with SIGKILL.
4. Restart: a worker that died is restarted as often as its placement allows; one whose stage raised ends the run.
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

from ..accounting.telemetry import get_logger
from ..channels.socket_directory import sweep
from ..errors import WorkerFailed
from ..graph.context import Worker
from ..graph.placement import Processes
from ..graph.statistics import WorkerState, WorkerStatistics
from ..util.exception_groups import first_exception
from .subreaper_process import describe_exit
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

log = get_logger("penstock.pipeline")

READ_BYTES = 64 * 1024

R = TypeVar("R")

Feed: TypeAlias = Callable[[str, str], Awaitable[None]]
"""Sends records to a middle stage's worker while it runs: (name of the worker, URL of its inbox)."""


class _Child:
    """One process that was started here, until it has been reaped."""

    def __init__(self, config: WorkerConfig, popen: subprocess.Popen[bytes], events: int) -> None:
        self.config = config
        self.pid = popen.pid
        self.state: WorkerState = "starting"
        self.connected = False
        """True once it has connected: its stage begins."""
        self.phase = "importing penstock"
        """The phase of its start, for messages."""
        self.started = anyio.Event()
        """Set when its stage begins; for a middle stage, when records may be sent to it."""
        self.finished = False
        """True once its stage has returned."""
        self.failure: Failed | None = None
        """The exception of its stage, if it raised one."""
        self.done = anyio.Event()
        """Set when the stage returned or raised: the process is about to end."""
        self.url = ""
        """The URL to which records may be sent, once a middle stage has started; empty before."""
        self.killed_because = ""
        """The reason for which it was killed without SIGTERM; empty where it was not."""
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
        """Wait until the process has ended, and reap it."""
        if self.running:
            await anyio.wait_readable(self._pidfd)
            self._popen.poll()

    async def receive(self) -> None:
        """Receive its events until it closes the pipe."""
        while self._read():
            await anyio.wait_readable(self._events)

    def receive_remaining(self) -> None:
        """Receive the events that are left in the pipe, after the process has ended."""
        while self._read():
            pass

    def _read(self) -> bool:
        """Handle the events that have arrived; return whether more may arrive."""
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
        """Kill the process, which must be replaced, for the reason `why`."""
        if self.running:
            self.killed_because = why
            self.signal(signal.SIGKILL)

    async def stop(self, within_s: float) -> None:
        """Stop the process: SIGTERM, a deadline, SIGKILL. Shielded from cancellation."""
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
        """Return whether the files of the sockets that it served may still exist."""
        return bool(self.config.channels.inbox_kind) and not self.finished and self.failure is None

    @property
    def label(self) -> str:
        """Return its name and id."""
        return f"{self.config.name} (pid {self.pid})"

    @property
    def exit_reason(self) -> str:
        """The cause of its exit, which is the reason of the trajectories that are lost with it. It must have exited."""
        name, status = self.label, self._popen.returncode
        # 1. The stage returned: trajectories that it still holds were neither sent nor dropped.
        if self.finished:
            return f"swallowed by {name}"
        # 2. The stage raised.
        if self.failure is not None:
            return f"{name} {self.failure.error}"
        # 3. The supervisor killed it. With another status it was exiting already when it was killed.
        if self.killed_because and status == -signal.SIGKILL:
            return f"{name} {self.killed_because}; it was killed"
        # 4. A signal from outside killed it, or it exited by itself, as `os._exit` does.
        return f"{name} {describe_exit(status)}{' before its stage had returned' if status >= 0 else ''}"

    def close(self) -> None:
        """Close the descriptors; the process must have been reaped."""
        os.close(self._pidfd)
        os.close(self._events)


class _Spawner:
    """Starts the processes of one stage. The stage is pickled once, into an anonymous file that every child inherits.

    It has a thread of its own: the kernel kills a child when the thread that started it ends, so that thread must stay.
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
        """Call a function that blocks. Shielded from cancellation, so that every started child is supervised."""
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
        """Return the state of the workers now."""
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
        """Kill `worker`, which is unresponsive, for the reason `why`; it is restarted as often as that is allowed."""
        for child in self._children.values():
            if child.config.name == worker:
                child.kill(why)

    async def run(self, channels: WorkerChannels, feed: Feed | None = None) -> None:
        """Run the workers until the stage has returned in all of them.

        Args:
            channels: the channels that the workers connect to.
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
        """Run one worker, restarting its process where it dies, until its stage returns."""
        restart = 0
        while True:
            child = await self._run_once(spawner, Worker(index, self._on.count, restart), feed)
            # 1. Its stage returned: the worker is done.
            if child.finished:
                return
            # 2. Its stage raised: so it would in a new process, and the run ends.
            if child.failure is not None:
                raise WorkerFailed(f"{child.exit_reason}\n\nIn the worker:\n\n{child.failure.traceback}")
            # 3. It died, and no restart is left: the run ends.
            log.warning("worker_died", how=child.exit_reason, restarts_left=self._on.restarts - restart)
            if restart == self._on.restarts:
                raise WorkerFailed(f"{child.exit_reason}; it may be restarted {self._on.restarts} times at most")
            # 4. It died, and may be restarted.
            restart += 1

    async def _run_once(self, spawner: _Spawner, worker: Worker, feed: Feed | None) -> _Child:
        """Start one process, wait until it has ended, and account for the trajectories that it held."""
        child = await self._start(spawner, worker)
        try:
            await self._watch(child, feed)
            self._accounting.ended(
                child.config.name,
                child.exit_reason,
                connected=child.connected,
                unaccounted_by=child.label if child.finished else "",
            )
        finally:
            child.close()
        return child

    async def _start(self, spawner: _Spawner, worker: Worker) -> _Child:
        """Start the process of `worker`.

        1. Open its counters: they must exist before the process, which inherits them.
        2. Spawn it. If that fails, end its accounting, so that the run does not wait for it.
        3. Close the descriptor of the counters here: the child has its own, and the accounting its mapping.
        """
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
        """Wait until a process has ended; stop it where this is cancelled or one of its tasks fails."""
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
        """Kill a process whose stage does not begin in time."""
        limit_s = self._on.start_timeout_s
        with anyio.move_on_after(limit_s) as deadline:
            await child.started.wait()
        if deadline.cancelled_caught:
            child.kill(f"did not start within start_timeout_s={limit_s:g}, it was {child.phase}")

    async def _enforce_exit_deadline(self, child: _Child) -> None:
        """Kill a process whose stage is done and that does not exit in time."""
        await child.done.wait()
        await anyio.sleep(self._on.stop_timeout_s)
        log.warning("worker_exit_timeout", worker=child.config.name, pid=child.pid, waited_s=self._on.stop_timeout_s)
        child.signal(signal.SIGKILL)

    async def _feed(self, child: _Child, feed: Feed) -> None:
        await child.started.wait()
        if child.url:
            await feed(child.config.name, child.url)

    async def _stop(self, child: _Child) -> None:
        """End a process in every case, and set its final state."""
        # 1. It still runs, because the watch was cancelled or failed: stop it.
        if child.running:
            child.state = "stopping"
            await child.stop(self._on.stop_timeout_s)
        # 2. It may have reported a result just before it ended.
        child.receive_remaining()
        # 3. It died without closing its inbox: delete the files of its sockets.
        if child.may_leave_sockets:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(sweep)
        # 4. A process that was stopped counts as finished.
        if child.state == "stopping" or child.finished:
            child.state = "finished"
        else:
            child.state = "failed" if child.failure else "dead"
