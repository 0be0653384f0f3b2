"""Start, watch, restart and stop the workers of a stage; the parent's side.

The supervisor knows workers by their handles: processes of this host (`WorkerProcess`), actors of Ray (`RayWorker`), or
processes that were started elsewhere (`JoinedWorker`). `WorkerAccounting` knows the trajectories that they hold. A
worker passes through five phases:

1. Start: its process is started, and imports the modules of its stage; one that takes too long is killed.
2. Place: it connects to the channel for its records, and gets its configuration.
3. Run: it reports events with its records, until its stage returns or raises, or the process dies. One of a source asks
   for prompts (`PromptAssigner`).
4. Exit: a process whose stage is done must exit by a deadline; any other one is asked to stop, and killed after a
   deadline.
5. Restart: a worker that died is restarted, as often within an hour as its placement allows; one whose stage raised
   ends the run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeAlias
from weakref import WeakSet

import anyio
from msgspec import structs

from ..._schemas.control import printable
from ..accounting.ledger import Ledger
from ..accounting.telemetry import get_logger
from ..channels.peer import Peer
from ..errors import PenstockError, ProtocolMismatch, WorkerFailed
from ..graph.assignment import Assign
from ..graph.context import Worker
from ..graph.placement import Joining, Processes, Remote
from ..graph.statistics import WorkerStatistics
from ..util.exception_groups import first_exception
from ..util.waiting import happens_within
from .prompt_assigner import PromptAssigner, instruct
from .restart_budget import RestartBudget
from .worker_accounting import WorkerAccounting
from .worker_messages import (
    Joined,
    Joins,
    KeylessAddress,
    Leaves,
    NoneLeft,
    StageConfig,
    Wants,
    WorkerChannels,
    WorkerEvent,
)
from .worker_progress import WorkerProgress
from .worker_stage import refuse_while_importing_main

log = get_logger("penstock.pipeline")

EXIT_TIMEOUT_S = 30.0
"""Seconds that the process of a worker whose stage is done may take to exit. Its records are safe, and the exit of an
interpreter that has imported torch takes seconds on a busy machine."""

Feed: TypeAlias = Callable[[str, str, anyio.Event], Awaitable[str]]
"""Sends records to a middle stage's worker: (its name, the URL of its inbox, the event that it leaves).

Closes the inbox when there are no more, or the worker leaves. Returns the reason why it could not be reached, or an
empty text."""


class WorkerHandle(Protocol):
    """One start of a worker, until it has ended."""

    config: StageConfig
    progress: WorkerProgress

    @property
    def phase(self) -> str:
        """The phase of its start, for messages: `importing train.py`."""
        ...

    @property
    def running(self) -> bool:
        """Return whether it has not ended."""
        ...

    @property
    def exit_reason(self) -> str:
        """The cause of its exit: the reason of the trajectories that are lost with it. It must have ended."""
        ...

    @property
    def misplaced(self) -> bool:
        """Return whether it never ran, because its place was on a host that had died. It must have ended."""
        ...

    async def exited(self) -> None:
        """Wait until it has ended."""
        ...

    async def watch(self) -> None:
        """Find out facts that no event reports while it runs, and kill it where it must be replaced."""
        ...

    async def finish(self) -> None:
        """Wait for the events that are left after it has ended, and remove what it left on the host."""
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

    async def start(self, config: StageConfig) -> WorkerHandle:
        """Start a worker that will ask for its place by the name in `config`."""
        ...


class Supervisor:
    """The workers of one stage."""

    channels: WorkerChannels
    """The channels of the workers; set before `run`."""

    def __init__(
        self,
        name: str,
        on: Remote,
        accounting: WorkerAccounting,
        ledger: Ledger,
        *,
        assign: Assign | None = None,
        groups_at_once: int = 1,
    ) -> None:
        """Prepare for workers.

        Args:
            name: the name of the stage.
            on: its placement.
            accounting: accounts for them.
            ledger: of the run.
            assign: yields the prompts of a source that can assign them; None for another stage.
            groups_at_once: the number of prompts that a worker of such a source samples at a time.
        """
        self._name = name
        self._on = on
        self._accounting = accounting
        self._ledger = ledger
        self._workers: dict[int, WorkerHandle] = {}
        """The last start of each worker, by index."""
        self._by_peer: dict[Peer, WorkerHandle] = {}
        """Those that have a place, by their connection."""
        self._placed = WeakSet[Peer]()
        """The connections that were given a place: messages of others are not taken."""
        accounting.takes = self._placed.__contains__
        self._assigner: PromptAssigner | None = None
        if assign is not None:
            at_first = 1 if isinstance(on, Joining) else on.count
            self._assigner = PromptAssigner(
                assign, ledger, accounting, self._place_of, at_a_time=groups_at_once, at_first=at_first
            )

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
        return progress.statistics(name, worker.phase, self._accounting.lag_of(progress.name))

    def _name_of(self, index: int, restart: int = 0) -> str:
        restarted = f", restart {restart}" if restart else ""
        return f"{self._name} {index + 1}/{self._on.count}{restarted}"

    def kill(self, worker: str, why: str) -> None:
        """Kill the unresponsive `worker` for the reason `why`; it is restarted as often as that is allowed."""
        for known in self._workers.values():
            if known.progress.name == worker:
                known.kill(why)

    # -- events --------------------------------------------------------------------------------------------------------

    def handle(self, peer: Peer, event: WorkerEvent) -> None:
        """Handle an event of a worker, with a place or without.

        Raises:
            ProtocolMismatch: this worker may not report it, or not now.
        """
        known = self._by_peer.get(peer)
        if isinstance(event, Joins):
            self._on_joins(peer, event)
        elif known is not None:
            known.progress.order.check(event)
            self._on_event(peer, known, event)

    def _on_event(self, peer: Peer, known: WorkerHandle, event: WorkerEvent) -> None:
        """Handle an event of a worker that has a place."""
        if isinstance(event, Wants):
            if self._assigner is None:
                raise ProtocolMismatch("expected no request for prompts, which this stage does not assign")
            self._assigner.ask(peer)
            return
        # Without text that a terminal would not print.
        texts = {name: value for name, value in structs.asdict(event).items() if isinstance(value, str)}
        known.progress.handle(structs.replace(event, **{name: printable(text) for name, text in texts.items()}))
        if isinstance(event, Leaves) and self._assigner is not None:
            instruct(peer, NoneLeft())  # after all that it was assigned
            self._assigner.workers_changed()

    def _on_joins(self, peer: Peer, event: Joins) -> None:  # noqa: ARG002 (others compare its digest)
        """Give a worker that was started from here its place."""
        for started in self._workers.values():
            if started.progress.name == peer.name and started.progress.peer is None:
                self._place(peer, started)
                return
        raise ProtocolMismatch(f"expected the name of a worker that was started and has no place yet, got {peer.name}")

    def _place(self, peer: Peer, worker: WorkerHandle, weights: KeylessAddress | None = None) -> None:
        """Give a worker its place; its messages are taken from now on."""
        worker.progress.peer = peer
        self._by_peer[peer] = worker
        self._placed.add(peer)
        instruct(peer, Joined(worker.config, self._ledger.step, weights))

    def _place_of(self, peer: Peer) -> int | None:
        """Return the place of a worker that takes prompts; None for one that has ended, or is leaving."""
        known = self._by_peer.get(peer)
        if known is None or peer.gone.is_set() or known.progress.leaving.is_set():
            return None
        return known.config.worker.index

    # -- from start to end ---------------------------------------------------------------------------------------------

    async def run(self, spawning: AbstractAsyncContextManager[Spawner], feed: Feed | None = None) -> None:
        """Run the workers until the stage has returned in all of them.

        Args:
            spawning: yields their spawner.
            feed: sends records to a worker that serves an inbox of its own.

        Raises:
            WorkerFailed: the stage raised in a worker, or a worker died more often than it may be restarted.
        """
        refuse_while_importing_main()
        try:
            async with spawning as spawner, anyio.create_task_group() as besides:
                if self._assigner is not None:
                    besides.start_soon(self._assigner.run)
                await self._run_all(spawner, feed)
                besides.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise first_exception(group, PenstockError) from None

    async def _run_all(self, spawner: Spawner, feed: Feed | None) -> None:
        async with anyio.create_task_group() as tasks:
            for index in range(self._on.count):
                tasks.start_soon(self._run_with_restarts, spawner, index, feed)

    async def _run_with_restarts(self, spawner: Spawner, index: int, feed: Feed | None) -> None:
        """Run one worker, restarting it where it dies, until its stage returns."""
        restart, budget = 0, RestartBudget(self._on.restarts)
        sharing = self._on.count if isinstance(self._on, Processes) else 1  # an actor of Ray reserves its own
        while True:
            worker = Worker(index, self._on.count, restart, sharing, self._accounting.evaluates_from)
            ended = await self._run_once(spawner, self._config(self._name_of(index, restart), worker), feed)
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

    def _config(self, name: str, worker: Worker) -> StageConfig:
        return StageConfig(name=name, stage=self._name, worker=worker, channels=self.channels)

    async def _run_once(self, spawner: Spawner, config: StageConfig, feed: Feed | None) -> WorkerHandle:
        """Start one worker, wait until it has ended, and account for the trajectories that it held."""
        self._accounting.open(config.name, config.worker)
        try:
            started = self._workers[config.worker.index] = await spawner.start(config)
        except BaseException:
            self._accounting.not_started(config.name)
            raise
        progress = started.progress
        log.info("worker_started", worker=config.name, pid=progress.pid)
        try:
            await self._watch(started, feed)
            self._accounting.ended(
                config.name,
                started.exit_reason,
                connected=progress.peer is not None,
                unaccounted_by=progress.label if progress.finished else "",
            )
        finally:
            started.close()
            self._forget(progress)
        return started

    def _forget(self, progress: WorkerProgress) -> None:
        """Forget the connection of a worker that has ended, to release its memory."""
        if progress.peer is not None:
            self._by_peer.pop(progress.peer, None)
            progress.peer = None
        if self._assigner is not None:
            self._assigner.workers_changed()

    async def _watch(self, worker: WorkerHandle, feed: Feed | None) -> None:
        """Wait until a worker has ended; stop it where this is cancelled or one of its tasks fails."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.watch)
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
            worker.kill(f"did not start within start_timeout_s={limit_s:g}, it was {worker.phase}")

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
        """Return: a worker that was started from here is not reached because it has died."""

    async def _stop(self, worker: WorkerHandle) -> None:
        """End a worker in every case, and set its final state."""
        # 1. It still runs, because the watch was cancelled or failed: stop it.
        if worker.running:
            worker.progress.state = "stopping"
            await worker.stop(self._on.stop_timeout_s)
        # 2. It may have reported a result just before it ended.
        await worker.finish()
        worker.progress.end()
