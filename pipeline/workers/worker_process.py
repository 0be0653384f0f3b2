"""Workers in processes of this host; the parent's side.

A child is watched by a pidfd, which is readable as soon as the process ends and never refers to another process; only
processes that were started here are signalled.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Self, TypeVar

import anyio
import anyio.to_thread
import msgspec

from ..accounting.telemetry import get_logger
from ..channels.shared_memory import scratch
from ..channels.socket_directory import sweep
from ..graph.context import Worker
from ..servers.subreaper_process import describe_exit
from .loop_watch import loop_over_limit
from .worker_accounting import WorkerAccounting
from .worker_messages import ProcessConfig, StageConfig, WorkerChannels, decode_events
from .worker_payload import interpreter_command, write_payload
from .worker_progress import WorkerProgress

log = get_logger("penstock.pipeline")

READ_BYTES = 64 * 1024

CLOSED_TIMEOUT_S = 5.0
"""Seconds from the end of a worker's pipe to its exit: it closes the pipe by exiting, unless its code has closed it."""

R = TypeVar("R")


class WorkerProcess:
    """One process that was started here, until it has been reaped; a `WorkerHandle`."""

    def __init__(self, config: StageConfig, popen: subprocess.Popen[bytes], events: int, watched: int) -> None:
        has_inbox = bool(config.channels.inbox_kind)
        self.progress = WorkerProgress(config.name, config.worker, "importing penstock", has_inbox=has_inbox)
        self.progress.pid = popen.pid
        self._has_inbox = has_inbox
        self._killed_because = ""
        """The reason for which it was killed without SIGTERM; empty where it was not."""
        self._popen = popen
        self._pidfd = os.pidfd_open(popen.pid)
        self._events = events
        self._watched = watched
        """The file that it shares with the watch on its event loop."""
        self._buffer = bytearray()
        os.set_blocking(events, False)

    @property
    def running(self) -> bool:
        """Return whether the process has not been reaped."""
        return self._popen.returncode is None

    @property
    def misplaced(self) -> bool:
        """Return false: its host is that of the pipeline."""
        return False

    async def exited(self) -> None:
        """Wait until the process has ended, and reap it."""
        if self.running:
            await anyio.wait_readable(self._pidfd)
            self._popen.poll()

    async def receive(self) -> None:
        """Receive its events until it closes the pipe; kill it where it does not exit then, or its loop is blocked."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._limit_blocking)
            while self._read():
                await anyio.wait_readable(self._events)
            await anyio.sleep(CLOSED_TIMEOUT_S)
            self.kill("closed the file descriptors that connect it with its parent, and did not exit")
            tasks.cancel_scope.cancel()

    async def _limit_blocking(self) -> None:
        """Kill it when its event loop does not run for longer than its stage allows."""
        self.kill(await loop_over_limit(self._watched, self.progress.name, self.signal))

    def _read(self) -> bool:
        """Handle the events that have arrived; return whether more may arrive."""
        try:
            read = os.read(self._events, READ_BYTES)
        except BlockingIOError:
            return self.running
        self._buffer += read
        for event in decode_events(self._buffer):
            self.progress.handle(event)
        return bool(read)

    def signal(self, number: int) -> None:
        """Send a signal to this process and to no other."""
        if self.running:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self, why: str = "") -> None:
        """Kill the process; for the reason `why`, where it must be replaced."""
        if self.running:
            self._killed_because = why
            self.signal(signal.SIGKILL)

    async def stop(self, within_s: float) -> None:
        """Stop the process: SIGTERM, a deadline, SIGKILL. Shielded from cancellation."""
        with anyio.CancelScope(shield=True):
            self.signal(signal.SIGTERM)
            with anyio.move_on_after(within_s) as deadline:
                await self.exited()
            if deadline.cancelled_caught:
                log.warning("worker_killed", worker=self.progress.name, pid=self.progress.pid, waited_s=within_s)
                self.signal(signal.SIGKILL)
                await self.exited()

    async def finish(self) -> None:
        """Receive the events that are left in the pipe; delete the sockets of a process that did not close them."""
        while self._read():
            pass
        if self._has_inbox and not self.progress.finished and self.progress.failure is None:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(sweep)

    @property
    def exit_reason(self) -> str:
        """The cause of its exit; it must have exited."""
        status = self._popen.returncode
        # 1. The supervisor killed it. With another status it was exiting already when it was killed.
        if self._killed_because and status == -signal.SIGKILL:
            return self.progress.reason_of(f"{self._killed_because}; it was killed")
        # 2. A signal from outside killed it, or it exited by itself, as `os._exit` does.
        by_itself = " before its stage had returned" if status >= 0 else ""
        return self.progress.reason_of(f"{describe_exit(status)}{by_itself}")

    def close(self) -> None:
        """Close the descriptors; the process must have been reaped."""
        os.close(self._pidfd)
        os.close(self._events)
        os.close(self._watched)


class ProcessSpawner:
    """Starts the processes of one stage. The stage is pickled once, into an anonymous file that every child inherits.

    It has a thread of its own: the kernel kills a child when the thread that started it ends, so that thread must stay.
    """

    def __init__(self, stage_name: str, stage: object, channels: WorkerChannels, accounting: WorkerAccounting) -> None:
        self._stage_name = stage_name
        self._stage = stage
        self._channels = channels
        self._accounting = accounting
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock starter")
        self._payload = -1

    async def __aenter__(self) -> Self:
        self._payload = await self._in_thread(write_payload, self._stage)
        return self

    async def __aexit__(self, *_: object) -> None:
        os.close(self._payload)
        self._thread.shutdown(wait=False)

    async def start(self, name: str, worker: Worker) -> WorkerProcess:
        """Start a process.

        1. Open its counters: they must exist before the process, which inherits them.
        2. Spawn it. If that fails, end its accounting, so that the run does not wait for it.
        3. Close the descriptor of the counters here: the child has its own, and the accounting its mapping.
        """
        counters = self._accounting.open(name)
        try:
            return WorkerProcess(*await self._in_thread(self._popen, name, worker, counters))
        except BaseException:
            self._accounting.not_started(name)
            raise
        finally:
            os.close(counters)

    async def _in_thread(self, function: Callable[..., R], *arguments: Any) -> R:
        """Call a function that blocks. Shielded from cancellation, so that every started child is supervised."""
        future = asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
        with anyio.CancelScope(shield=True):
            await asyncio.wait([future])
        return future.result()

    def _popen(self, name: str, worker: Worker, counters: int) -> tuple[StageConfig, subprocess.Popen[bytes], int, int]:
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        watched = -1
        try:
            watched = scratch("event loop")
            config = ProcessConfig(
                of_stage=StageConfig(name=name, stage=self._stage_name, worker=worker, channels=self._channels),
                parent=os.getpid(),
                payload=self._payload,
                counters=counters,
                events=write_end,
                watched=watched,
            )
            popen = subprocess.Popen(  # noqa: S603 (this very interpreter)
                interpreter_command("penstock._pipeline.workers.worker", msgspec.json.encode(config).decode()),
                stdin=subprocess.DEVNULL,
                pass_fds=(config.payload, config.counters, config.events, config.watched),
                process_group=0,
            )
        except BaseException:
            os.close(read_end)
            if watched >= 0:
                os.close(watched)
            raise
        finally:
            os.close(write_end)
        return config.of_stage, popen, read_end, watched
