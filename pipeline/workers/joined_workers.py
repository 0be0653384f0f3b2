"""Workers that were started elsewhere and join the pipeline; the parent's side.

A worker connects to the channel for its records, and asks for its place (`Joins`). The answer has its name, that of the
stage and its own, and its share of the work. From then on it is a worker like any other: its events come with its
records, and the end of its connection is its end.

The workers of a middle stage are fed, and those of a source that can assign prompts get theirs, so there may be any
number of them. Another source has as many places as workers are expected: more of them wait for one.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import anyio
from anyio.abc import TaskGroup

from ..._schemas.control import Reject
from ..accounting.ledger import Ledger
from ..accounting.telemetry import get_logger
from ..channels.heartbeat import UNRESPONSIVE
from ..channels.peer import Peer
from ..channels.remote_receiver import RemoteReceiver
from ..errors import ProtocolMismatch, SenderRejected, WorkerFailed, WorkersAbsent
from ..graph.assignment import Assign
from ..graph.context import Worker
from ..graph.placement import Joining, Remote
from ..graph.statistics import WorkerStatistics
from ..util.cancelling import cancelled_after
from ..util.waiting import Waiters
from .prompt_assigner import instruct
from .supervisor import Feed, Spawner, Supervisor, WorkerHandle
from .worker_accounting import WorkerAccounting
from .worker_messages import (
    Joins,
    KeylessAddress,
    NoneLeft,
    Refused,
    Serving,
    StageConfig,
    WorkerEvent,
    WorkerInstruction,
)
from .worker_progress import WorkerProgress

log = get_logger("penstock.pipeline")


class Feeder(Protocol):
    """Sends the records of a middle stage to its workers."""

    @property
    def ended(self) -> bool:
        """Return whether there are no more records."""
        ...

    @property
    def waiting(self) -> bool:
        """Return whether records wait for a worker."""
        ...

    async def look(self) -> None:
        """Receive one record for the worker that is fed next, or notice that there are no more."""
        ...


class JoinedWorker:
    """One worker, from its place until its connection has ended; a `WorkerHandle`."""

    phase = "starting its stage"
    misplaced = False

    def __init__(self, config: StageConfig, peer: Peer) -> None:
        self.config = config
        self.progress = WorkerProgress(config)
        self.peer = peer
        self._killed_because = ""

    @property
    def running(self) -> bool:
        """Return whether its connection has not ended."""
        return not self.peer.gone.is_set()

    async def exited(self) -> None:
        """Wait until its connection has ended."""
        await self.peer.gone.wait()

    async def watch(self) -> None:
        """Return: it tells everything itself."""

    async def finish(self) -> None:
        """Return: it leaves no trace here."""

    def kill(self, why: str = "") -> None:
        """Close the connection, and so end the stage in the worker; for the reason `why`."""
        self._killed_because = why
        self.peer.control.shutdown_read()

    def reject(self, why: str) -> None:
        """Close the connection for good: the worker fails, for the reason `why`."""
        self.peer.send(Reject(SenderRejected.__name__, f"it {why}"))
        self.kill(why)

    async def stop(self, within_s: float) -> None:
        """Close the channel for the worker, to cancel its stage, and the connection after a deadline."""
        with anyio.CancelScope(shield=True):
            await self.peer.dismiss()
            with anyio.move_on_after(within_s):
                await self.exited()
            if self.running:
                self.kill()

    @property
    def exit_reason(self) -> str:
        """The cause of its end."""
        if self._killed_because:
            return self.progress.reason_of(self._killed_because)
        if self.peer.unresponsive_s is not None:
            return self.progress.reason_of(UNRESPONSIVE.format(self.peer.unresponsive_s))
        return self.progress.reason_of("ended its connection without a word: it died, or its host did")

    def close(self) -> None:
        """Return: no resource is held for it."""


class JoinedWorkers(Supervisor):
    """The workers of one stage: they join and leave."""

    receiver: RemoteReceiver[Any]
    """The channel that they send on; set before `run`."""
    digest: str
    """The digest of the configuration or script of their stage; set before `run`."""

    feeder: Feeder | None = None
    """Of a middle stage; set before `run`."""

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
        """Prepare for workers; see `Supervisor`."""
        super().__init__(name, on, accounting, ledger, assign=assign, groups_at_once=groups_at_once)
        assert isinstance(on, Joining)  # noqa: S101 (see `Workers`)
        self._joining = on
        self._requests: deque[tuple[Peer, Joins]] = deque()
        """The requests that wait for a place."""
        self._over = False
        """True once the stage is done: workers that come now get no place."""
        self._starts: Counter[int] = Counter()
        """The number of times that each place was taken."""
        self._joins: Counter[str] = Counter()
        """The number of times that each name was taken again."""
        self._names: set[str] = set()
        """The names that were taken."""
        self._done: set[int] = set()
        """The places whose share of the work is done."""
        self._changed = Waiters()
        if self._assigner is not None:
            self._assigner.on_over = self._changed.wake_all
        self._last_end = "none has joined yet"
        """The last end of a worker, for messages."""

    def statistics(self) -> tuple[WorkerStatistics, ...]:
        """Return the state of the workers that are here now."""
        return tuple(self._statistics_of(worker, worker.progress.name) for worker in self._workers.values())

    def handle(self, peer: Peer, event: WorkerEvent) -> None:
        """Handle an event; see `Supervisor.handle`."""
        if isinstance(event, Serving) and not event.url.startswith("tcp://"):
            raise ProtocolMismatch(f"expected the URL of an inbox over tcp, got {event.url!r}")
        super().handle(peer, event)
        self._changed.wake_all()

    def _on_joins(self, peer: Peer, event: Joins) -> None:
        """Have a worker wait for a place."""
        if peer in self._placed or any(known is peer for known, _ in self._requests):
            raise ProtocolMismatch("expected one request for a place on a connection, got another one")
        if self._over:
            self._turn_away(peer, NoneLeft())
        else:
            self._requests.append((peer, event))

    def _turn_away(self, peer: Peer, instruction: WorkerInstruction) -> None:
        """Send a worker the reason why it gets no place, and end its connection."""
        instruct(peer, instruction)
        peer.dismissed = True
        peer.control.shutdown_read()

    async def start(self, config: StageConfig) -> WorkerHandle:
        """Tell the worker that it has this place; see `Spawner`."""
        joined = self._workers[config.worker.index]
        assert isinstance(joined, JoinedWorker)  # noqa: S101 (see `_give_places`)
        joined.peer.name = config.name
        self._place(joined.peer, joined, self._weights)
        return joined

    async def run(self, spawning: AbstractAsyncContextManager[Spawner], feed: Feed | None = None) -> None:
        """Give workers their places until the stage is done; see `Supervisor.run`.

        Raises:
            WorkerFailed: the stage raised in a worker.
            WorkersAbsent: there was no worker for too long.
        """
        log.info("workers_may_join", stage=self._name, url=self.receiver.url)
        await super().run(spawning, feed)

    async def _run_all(self, spawner: Spawner, feed: Feed | None) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._limit_absence)
            if self.feeder is not None:
                tasks.start_soon(self._look_for_the_end, self.feeder)
            await self._give_places(spawner, tasks, feed)
            self._over = True
            for peer in self.receiver.peers:
                if peer not in self._placed:
                    self._turn_away(peer, NoneLeft())
            tasks.cancel_scope.cancel()

    # -- places --------------------------------------------------------------------------------------------------------

    async def _give_places(self, spawner: Spawner, tasks: TaskGroup, feed: Feed | None) -> None:
        while not self._complete:
            while self._requests and (place := self._free_place) is not None:
                peer, request = self._requests.popleft()
                if peer.gone.is_set():
                    continue
                if (refused := self._refusal(request)) is not None:
                    log.warning("worker_refused", worker=peer.name, reason=refused.reason)
                    self._turn_away(peer, refused)
                    continue
                sharing = self._on.count if self._assigner is None else 1  # then the first one evaluates for all
                worker = Worker(place, sharing, self._starts[place], evaluates_from=self._accounting.evaluates_from)
                self._starts[place] += 1
                config = self._config(self._unused_name(peer.name), worker)
                self._workers[place] = joined = JoinedWorker(config, peer)
                tasks.start_soon(self._run_joined, spawner, joined, feed)
            await self._changed.wait()

    @property
    def _weights(self) -> KeylessAddress | None:
        address = self._joining.weights
        if address is None:
            return None
        return KeylessAddress(address.url, address.local, address.host, address.generation, address.trusted_link)

    @property
    def _complete(self) -> bool:
        """Return whether there is no more work: none is left to give, and no worker has any."""
        if self._workers:
            return False
        if self.feeder is not None:
            return self.feeder.ended
        return self._assigner.over if self._assigner is not None else len(self._done) == self._on.count

    @property
    def _free_place(self) -> int | None:
        """Return the first place that is free; None if all are taken."""
        place = next(place for place in range(sys.maxsize) if place not in self._workers and place not in self._done)
        bounded = self.feeder is None and self._assigner is None
        return None if bounded and place >= self._on.count else place

    def _refusal(self, request: Joins) -> Refused | None:
        if request.digest != self.digest:
            return Refused(
                f"it makes its stage of other content, with the digest {request.digest[:12]}, than the pipeline, with "
                f"{self.digest[:12]}: give it the same configuration and values, or the same script"
            )
        return None

    def _unused_name(self, member: str) -> str:
        name = first = f"{self._name} {member}"
        while name in self._names:
            self._joins[first] += 1
            name = f"{first}, restart {self._joins[first]}"
        self._names.add(name)
        return name

    async def _run_joined(self, spawner: Spawner, joined: JoinedWorker, feed: Feed | None) -> None:
        """Run a worker until it has ended.

        Raises:
            WorkerFailed: its stage raised.
        """
        place, progress = joined.config.worker.index, joined.progress
        try:
            await self._run_once(spawner, joined.config, feed)
        finally:
            del self._workers[place]
            self._changed.wake_all()
        # 1. Its stage raised: so it would elsewhere, and the run ends.
        if progress.failure is not None:
            raise WorkerFailed(progress.failure.message(joined.exit_reason))
        # 2. Its stage returned: its share of the work is done.
        if progress.finished:
            self._done.add(place)
            return
        # 3. It left, or died: another one may take its place.
        self._last_end = joined.exit_reason
        report = log.info if progress.left else log.warning
        report("worker_left" if progress.left else "worker_died", how=joined.exit_reason, here=len(self._workers))

    async def _limit_absence(self) -> None:
        """End the run where there was no worker for too long.

        Raises:
            WorkersAbsent: with the end of the last one.
        """
        limit_s = self._joining.absence_timeout_s
        while True:
            with anyio.move_on_after(limit_s) as limit:
                await self._workers_here()
            if limit.cancelled_caught:
                raise WorkersAbsent(
                    f"expected a worker of {self._name} to join at {self.receiver.url} within {limit_s:g} s, got none; "
                    f"{self._last_end}: start one with `penstock worker --join`, or raise absence_timeout_s"
                )
            while self._workers:
                await self._changed.wait()

    async def _look_for_the_end(self, feeder: Feeder) -> None:
        """Notice that there are no more records while no worker is fed with them."""
        while not feeder.ended:
            if self._starts and not self._workers and not feeder.waiting:
                async with cancelled_after(self._workers_here):
                    await feeder.look()
                self._changed.wake_all()
            if not feeder.ended:
                await self._changed.wait()

    async def _workers_here(self) -> None:
        """Wait until there are workers."""
        while not self._workers:
            await self._changed.wait()

    def _on_unreachable(self, worker: WorkerHandle, why: str) -> None:
        """Reject a worker that listens where the pipeline cannot connect to it."""
        assert isinstance(worker, JoinedWorker)  # noqa: S101 (see `_give_places`)
        worker.reject(f"could not be reached: {why}")
