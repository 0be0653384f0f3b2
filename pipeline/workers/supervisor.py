"""Start, watch, restart and stop the workers of a stage; the parent's side.

The supervisor knows workers by their handles: processes of this host (`WorkerProcess`), actors of Ray (`RayWorker`), or
processes that were started elsewhere (`JoinedWorker`). `WorkerAccounting` knows which trajectories they hold. A worker
passes through four phases:

1. Start: its process is started, imports what its stage needs, and connects; one that takes too long is killed.
2. Run: it reports events, until its stage returns or raises, or the process dies.
3. Exit: a process whose stage is done must exit by a deadline; any other one is asked to stop, and killed after a
   deadline.
4. Restart: a worker that died is restarted, as often within an hour as its placement allows; one whose stage raised
   ends the run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeAlias

import anyio

from ..accounting.telemetry import get_logger
from ..channels.peer import Peer
from ..errors import WorkerFailed
from ..graph.context import Worker
from ..graph.placement import Processes, Remote
from ..graph.statistics import WorkerStatistics
from ..util.exception_groups import first_exception
from ..util.waiting import happens_within
from .restart_budget import RestartBudget
from .worker_accounting import WorkerAccounting
from .worker_messages import WorkerEvent
from .worker_progress import WorkerProgress
from .worker_stage import refuse_while_importing_main

log = get_logger("penstock.pipeline")

EXIT_TIMEOUT_S = 30.0
"""Seconds that the process of a worker whose stage is done may take to exit. Its records are safe, and the exit of an
interpreter that has imported torch takes seconds on a busy machine."""

Feed: TypeAlias = Callable[[str, str, anyio.Event], Awaitable[str]]
"""Sends records to a middle stage's worker: (its name, the URL of its inbox, the event that it leaves).

Closes the inbox when there are no more, or the worker leaves. Returns why it could not be reached; an empty text where
it could."""


class WorkerHandle(Protocol):
    """One start of a worker, until it has ended."""

    progress: WorkerProgress

    @property
    def running(self) -> bool:
        """Return whether it has not ended."""
        ...

    @property
    def exit_reason(self) -> str:
        """The cause of its exit, which is the reason of the trajectories that are lost with it. It must have ended."""
        ...

    @property
    def misplaced(self) -> bool:
        """Return whether it never ran, because its place was on a host that had died. It must have ended."""
        ...

    async def exited(self) -> None:
        """Wait until it has ended."""
        ...

    async def receive(self) -> None:
        """Have `progress` handle its events while it runs."""
        ...

    async def finish(self) -> None:
        """Handle the events that are left after it has ended, and remove what it left on the host."""
        ...

    def kill(self, why: str = "") -> None:
        """Kill it; for the reason `why`, where it must be replaced."""
        ...

    async def stop(self, within_s: float) -> None:
        """Ask its stage to stop, and kill it after a deadline. Shielded from cancellation."""
        ...

    def close(self) -> None:
        """Release everything that belongs to it; it must have ended."""
        ...


class Spawner(Protocol):
    """Starts the workers of one stage."""

    async def start(self, name: str, worker: Worker) -> WorkerHandle:
        """Start a worker, which is accounted for from then on; where it cannot be started, it is not."""
        ...


class Supervisor:
    """The workers of one stage."""

    def __init__(self, name: str, on: Remote, accounting: WorkerAccounting) -> None:
        self._name = name
        self._on = on
        self._accounting = accounting
        self._workers: dict[int, WorkerHandle] = {}
        """The last start of each worker, by index."""

    def statistics(self) -> tuple[WorkerStatistics, ...]:
        """Return the state of the workers now."""
        return tuple(self._statistics(index) for index in range(self._on.count))

    def _statistics(self, index: int) -> WorkerStatistics:
        name, started = self._name_of(index), self._workers.get(index)
        if started is None:
            return WorkerStatistics(name=name, pid=None, state="starting", restarts=0)
        return self._statistics_of(started, name)

    def _statistics_of(self, worker: WorkerHandle, name: str) -> WorkerStatistics:
        progress = worker.progress
        return progress.statistics(name, self._accounting.lag_of(progress.name))

    def _name_of(self, index: int, restart: int = 0) -> str:
        restarted = f", restart {restart}" if restart else ""
        return f"{self._name} {index + 1}/{self._on.count}{restarted}"

    def kill(self, worker: str, why: str) -> None:
        """Kill `worker`, which is unresponsive, for the reason `why`; it is restarted as often as that is allowed."""
        for known in self._workers.values():
            if known.progress.name == worker:
                known.kill(why)

    def handle(self, worker: Peer, event: WorkerEvent) -> None:
        """Handle an event of `worker` that arrived with its records."""
        for known in self._workers.values():
            if known.progress.name == worker.name:
                known.progress.handle(event)

    async def run(self, spawning: AbstractAsyncContextManager[Spawner], feed: Feed | None = None) -> None:
        """Run the workers until the stage has returned in all of them.

        Args:
            spawning: yields what starts them.
            feed: sends records to a worker that serves an inbox of its own.

        Raises:
            WorkerFailed: the stage raised in a worker, or a worker died more often than it may be restarted.
        """
        refuse_while_importing_main()
        try:
            async with spawning as spawner, anyio.create_task_group() as tasks:
                for index in range(self._on.count):
                    tasks.start_soon(self._run_with_restarts, spawner, index, feed)
        except BaseExceptionGroup as group:
            raise first_exception(group, WorkerFailed) from None

    async def _run_with_restarts(self, spawner: Spawner, index: int, feed: Feed | None) -> None:
        """Run one worker, restarting it where it dies, until its stage returns."""
        restart, budget = 0, RestartBudget(self._on.restarts)
        sharing = self._on.count if isinstance(self._on, Processes) else 1  # an actor of Ray reserves its own
        while True:
            worker = Worker(index, self._on.count, restart, sharing, self._accounting.evaluates_from)
            ended = await self._run_once(spawner, worker, feed)
            # 1. Its stage returned: the worker is done.
            if ended.progress.finished:
                return
            # 2. Its stage raised: so it would in a new process, and the run ends.
            if (failure := ended.progress.failure) is not None:
                raise WorkerFailed(failure.message(ended.exit_reason))
            # 3. It never ran, for the node of its place had died before its cluster knew it: it is placed again.
            if ended.misplaced:
                continue
            # 4. It died, and no restart is left: the run ends.
            now = anyio.current_time()
            log.warning("worker_died", how=ended.exit_reason, restarts_left=budget.left(now))
            if not budget.take(now):
                raise WorkerFailed(f"{ended.exit_reason}; it may be restarted {self._on.restarts} times within an hour")
            # 5. It died, and may be restarted.
            restart += 1

    async def _run_once(self, spawner: Spawner, worker: Worker, feed: Feed | None) -> WorkerHandle:
        """Start one worker, wait until it has ended, and account for the trajectories that it held."""
        name = self._name_of(worker.index, worker.restart)
        started = self._workers[worker.index] = await spawner.start(name, worker)
        log.info("worker_started", worker=name, pid=started.progress.pid)
        try:
            await self._watch(started, feed)
            self._accounting.ended(
                name,
                started.exit_reason,
                connected=started.progress.connected,
                unaccounted_by=started.progress.label if started.progress.finished else "",
            )
        finally:
            started.close()
        return started

    async def _watch(self, worker: WorkerHandle, feed: Feed | None) -> None:
        """Wait until a worker has ended; stop it where this is cancelled or one of its tasks fails."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.receive)
            tasks.start_soon(self._enforce_exit_deadline, worker)
            tasks.start_soon(self._limit_start, worker)
            if feed is not None:
                tasks.start_soon(self._feed, worker, feed)
            try:
                await worker.exited()
            finally:
                await self._stop(worker)
                tasks.cancel_scope.cancel()

    async def _limit_start(self, worker: WorkerHandle) -> None:
        """Kill a worker whose stage does not begin in time."""
        limit_s = self._on.start_timeout_s
        if not await happens_within(worker.progress.started, limit_s):
            worker.kill(f"did not start within start_timeout_s={limit_s:g}, it was {worker.progress.phase}")

    async def _enforce_exit_deadline(self, worker: WorkerHandle) -> None:
        """Kill a worker whose stage is done and whose process does not exit in time."""
        await worker.progress.done.wait()
        await anyio.sleep(EXIT_TIMEOUT_S)
        log.warning(
            "worker_exit_timeout",
            worker=worker.progress.name,
            pid=worker.progress.pid,
            waited_s=EXIT_TIMEOUT_S,
        )
        worker.kill()

    async def _feed(self, worker: WorkerHandle, feed: Feed) -> None:
        """Send records to a worker of a middle stage until it leaves."""
        progress = worker.progress
        await progress.started.wait()
        if not progress.url:
            return
        if unreachable := await feed(progress.name, progress.url, progress.leaving):
            self._on_unreachable(worker, unreachable)

    def _on_unreachable(self, worker: WorkerHandle, why: str) -> None:
        """Do nothing: a worker that was started from here is not reached because it has died."""

    async def _stop(self, worker: WorkerHandle) -> None:
        """End a worker in every case, and set its final state."""
        # 1. It still runs, because the watch was cancelled or failed: stop it.
        if worker.running:
            worker.progress.state = "stopping"
            await worker.stop(self._on.stop_timeout_s)
        # 2. It may have reported a result just before it ended.
        await worker.finish()
        worker.progress.end()
