"""Workers in processes of this host; the parent's side.

A child is watched by a pidfd: it is readable as soon as the process ends, and never refers to another one. Only
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
from functools import partial
from typing import Any, Self, TypeVar

import anyio
import anyio.to_thread
import msgspec

from ..accounting.telemetry import get_logger
from ..channels.shared_memory import scratch
from ..channels.socket_directory import sweep
from ..servers.subreaper_process import describe_exit
from .loop_watch import loop_over_limit, note_phase, phase_in
from .worker_messages import ProcessConfig, StageConfig
from .worker_payload import child_program, write_payload
from .worker_progress import WorkerProgress

log = get_logger("penstock.pipeline")

CLOSED_TIMEOUT_S = 5.0
"""Seconds from the end of a worker's connection to its exit, unless its stage is done: it ends the connection by
exiting, if its code has not ended it."""

R = TypeVar("R")


class WorkerProcess:
    """One process that was started here, until it has been reaped; a `WorkerHandle`."""

    misplaced = False

    def __init__(self, config: StageConfig, popen: subprocess.Popen[bytes], watched: int) -> None:
        self.config = config
        self.progress = WorkerProgress(config)
        self.progress.pid = popen.pid
        self._killed_because = ""
        """The reason why it was killed without SIGTERM; empty if it was not."""
        self._popen = popen
        self._pidfd = os.pidfd_open(popen.pid)
        self._watched = watched
        """The file that it shares with the watch on its event loop."""

    @property
    def phase(self) -> str:
        """The phase of its start, for messages."""
        return phase_in(self._watched) if self.running else ""

    @property
    def running(self) -> bool:
        """Return whether the process has not been reaped."""
        return self._popen.returncode is None

    async def exited(self) -> None:
        """Wait until the process has ended, and reap it."""
        if self.running:
            await anyio.wait_readable(self._pidfd)
            self._popen.poll()

    async def watch(self) -> None:
        """Kill it where its loop is blocked, or where it has ended its connection and does not exit."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._limit_blocking)
            await self.progress.started.wait()
            if (peer := self.progress.peer) is not None:
                await peer.gone.wait()
                await anyio.sleep(CLOSED_TIMEOUT_S)
                if not self.progress.done.is_set():
                    self.kill("ended its connection with its parent, and did not exit")
                    tasks.cancel_scope.cancel()

    async def _limit_blocking(self) -> None:
        """Kill it when its event loop does not run for longer than its stage allows."""
        self.kill(await loop_over_limit(self._watched, self.progress.name, self.signal))

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
        """Wait until its events are handled; delete the sockets of a process that did not close them."""
        with anyio.CancelScope(shield=True):
            if self.progress.peer is not None:
                with anyio.move_on_after(CLOSED_TIMEOUT_S):
                    await self.progress.peer.gone.wait()
            if self.config.channels.inbox_kind and not self.progress.finished and self.progress.failure is None:
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
        os.close(self._watched)


class ProcessSpawner:
    """Starts the processes of one stage. The stage is pickled once, into an anonymous file that every child inherits.

    It has a thread of its own: the kernel kills a child when the thread that started it ends, so that thread must stay.
    """

    def __init__(self, stage: object, python: str | None = None) -> None:
        self._stage = stage
        self._python = python
        """The interpreter of the children; `None` for this one."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock starter")
        self._payload = -1

    async def __aenter__(self) -> Self:
        self._payload = await self._in_thread(partial(write_payload, self._stage, prepared=not self._python))
        return self

    async def __aexit__(self, *_: object) -> None:
        os.close(self._payload)
        self._thread.shutdown(wait=False)

    async def start(self, config: StageConfig) -> WorkerProcess:
        """Start a process."""
        return WorkerProcess(config, *await self._in_thread(self._popen, config))

    async def _in_thread(self, function: Callable[..., R], *arguments: Any) -> R:
        """Call a function that blocks. Shielded from cancellation, so that every started child is supervised."""
        future = asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
        with anyio.CancelScope(shield=True):
            await asyncio.wait([future])
        return future.result()

    def _popen(self, config: StageConfig) -> tuple[subprocess.Popen[bytes], int]:
        watched = scratch("event loop")
        try:
            note_phase(watched, "importing penstock")
            process = ProcessConfig(
                name=config.name,
                stage=config.stage,
                outbox_url=config.channels.outbox_url,
                outbox_kind=config.channels.outbox_kind,
                parent=os.getpid(),
                payload=self._payload,
                watched=watched,
            )
            command, environment = child_program(
                self._python, "penstock._pipeline.workers.worker", msgspec.json.encode(process).decode()
            )
            popen = subprocess.Popen(  # noqa: S603 (this very interpreter, or the user's)
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=(process.payload, process.watched),
                process_group=0,
            )
        except BaseException:
            os.close(watched)
            raise
        return popen, watched
