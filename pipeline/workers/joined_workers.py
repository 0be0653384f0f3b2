"""Workers that were started elsewhere and join the pipeline; the parent's side.

A worker connects to the channel on which it will send, and asks for its place (`Joins`). The answer has its name, which
is that of the stage and its own, and its share of the work. From then on it is a worker like any other: its events come
with its records, and the end of its connection is its end.

The workers of a middle stage are fed, and those of a source that can assign prompts are told which to sample, so there
may be any number of them. Another source has as many places as workers are expected: more of them wait for one.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol
from weakref import WeakSet

import anyio
from anyio.abc import TaskGroup
from msgspec import structs

from ..._schemas.control import Instruction, Reject, printable
from ..accounting.ledger import Ledger
from ..accounting.telemetry import get_logger
from ..channels.heartbeat import UNRESPONSIVE
from ..channels.peer import Peer
from ..channels.remote_receiver import RemoteReceiver
from ..errors import PenstockError, ProtocolMismatch, SenderRejected, WorkerFailed, WorkersAbsent
from ..graph.context import Worker
from ..graph.placement import Joining
from ..graph.stage_info import Assignment
from ..graph.statistics import WorkerStatistics
from ..util.cancelling import cancelled_after
from ..util.exception_groups import first_exception
from ..util.waiting import Waiters
from .event_order import EventOrder
from .supervisor import Feed, Spawner, Supervisor, WorkerHandle
from .worker_accounting import WorkerAccounting
from .worker_messages import (
    Assigned,
    Joined,
    Joins,
    KeylessAddress,
    Leaves,
    NoneLeft,
    Refused,
    Serving,
    StageConfig,
    Wants,
    WorkerChannels,
    WorkerEvent,
    WorkerInstruction,
    encode_instruction,
)
from .worker_progress import WorkerProgress

log = get_logger("penstock.pipeline")

JOINED = "starting its stage"


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

    def __init__(self, config: StageConfig, peer: Peer, receiver: RemoteReceiver[Any]) -> None:
        self.config = config
        self.peer = peer
        self.misplaced: bool = False
        """Never: it has begun where it runs."""
        has_inbox = bool(config.channels.inbox_kind)
        self.progress = WorkerProgress(config.name, config.worker, JOINED, has_inbox=has_inbox)
        self.order = EventOrder(has_inbox=has_inbox)
        self._receiver = receiver
        self._killed_because = ""

    @property
    def running(self) -> bool:
        """Return whether its connection has not ended."""
        return not self.peer.gone.is_set()

    async def exited(self) -> None:
        """Wait until its connection has ended."""
        await self.peer.gone.wait()

    async def receive(self) -> None:
        """Return: its events come with its records."""

    async def finish(self) -> None:
        """Return: nothing of it is left here."""

    def kill(self, why: str = "") -> None:
        """Close the connection, which ends the stage in the worker; for the reason `why`."""
        self._killed_because = why
        self.peer.control.shutdown_read()

    def reject(self, why: str) -> None:
        """Close the connection for good: the worker fails, for the reason `why`."""
        self._receiver.send(self.peer.identity, Reject(SenderRejected.__name__, f"it {why}"))
        self.kill(why)

    async def stop(self, within_s: float) -> None:
        """Close the channel for the worker, which cancels its stage, and the connection after a deadline."""
        with anyio.CancelScope(shield=True):
            await self._receiver.dismiss(self.progress.name)
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
        if self.peer.violation:
            return self.progress.reason_of(self.peer.violation)
        return self.progress.reason_of("ended its connection without a word: it died, or its host did")

    def close(self) -> None:
        """Return: nothing is held for it."""


class JoinedWorkers(Supervisor):
    """The workers of one stage, which join and leave."""

    def __init__(
        self,
        name: str,
        on: Joining,
        accounting: WorkerAccounting,
        *,
        prompts: Callable[[], AsyncIterator[Assignment]] | None,
        groups_at_once: int,
        feeder: Feeder | None,
        ledger: Ledger,
    ) -> None:
        """Prepare for workers.

        Args:
            name: the name of the stage.
            on: its placement.
            accounting: accounts for them.
            prompts: returns the prompts of a source that can assign them; None for another stage.
            groups_at_once: the number of prompts that a worker of such a source samples at a time.
            feeder: of a middle stage; None for a source.
            ledger: of the run.
        """
        super().__init__(name, on, accounting)
        self.receiver: RemoteReceiver[Any]
        """The channel on which they send; set before `run`."""
        self.channels: WorkerChannels
        """What they need to know of the channels; set before `run`."""
        self.digest = ""
        """The digest of that from which they have to make the stage; set before `run`."""
        self._joining = on
        self._prompts = prompts
        self._groups_at_once = groups_at_once
        self._feeder = feeder
        self._ledger = ledger
        self._requests: deque[tuple[Peer, Joins]] = deque()
        """Those who wait for a place."""
        self._by_peer: dict[Peer, JoinedWorker] = {}
        """The workers, by their connection."""
        self._requested = WeakSet[Peer]()
        """The connections that have asked for a place."""
        self._placed = WeakSet[Peer]()
        """The connections that were given a place: what others send is not taken."""
        accounting.takes = self._placed.__contains__
        accounting.on_room = self._let_full_ask
        self._asking: deque[Peer] = deque()
        """Those who wait for a prompt."""
        self._full: list[Peer] = []
        """Those who have asked for one, and hold as many groups as they may."""
        self._none_left = False
        """Whether all prompts are assigned."""
        self._over = False
        """Whether the stage is done: there is nothing for workers that come now."""
        self._starts: Counter[int] = Counter()
        """How often each place was taken."""
        self._joins: Counter[str] = Counter()
        """How often each name was taken again."""
        self._names: set[str] = set()
        """The names that were taken."""
        self._done: set[int] = set()
        """The places whose share of the work is done."""
        self._changed = Waiters()
        self._last_end = "none has joined yet"
        """The last end of a worker, for messages."""

    def statistics(self) -> tuple[WorkerStatistics, ...]:
        """Return the state of the workers that are here now."""
        return tuple(self._statistics_of(worker, worker.progress.name) for worker in self._workers.values())

    def handle(self, worker: Peer, event: WorkerEvent) -> None:
        """Handle an event of `worker`, which may not have a place yet.

        Raises:
            ProtocolMismatch: this worker may not report it, or not now.
        """
        known = self._by_peer.get(worker)
        if known is not None:
            known.order.check(event)
        match event:
            case Joins() if worker in self._requested:
                raise ProtocolMismatch("expected one request for a place on a connection, got another one")
            case Joins():
                self._requested.add(worker)
                if self._over:
                    self._turn_away(worker, NoneLeft())
                else:
                    self._requests.append((worker, event))
            case Wants():
                self._ask(worker)
            case Serving(url) if not url.startswith("tcp://"):
                raise ProtocolMismatch(f"expected the URL of an inbox over tcp, got {url!r}")
            case Leaves():
                if known is not None and self._prompts is not None:
                    self._instruct(worker, NoneLeft())  # after all that it was assigned
                self._progress(worker, event)
            case _:
                self._progress(worker, event)
        self._changed.wake_all()

    def _ask(self, worker: Peer) -> None:
        """Note that a worker asks for a prompt.

        Raises:
            ProtocolMismatch: it asks for more at a time than it could sample, or for prompts of a stage that has none.
        """
        most = 0 if self._prompts is None else self._groups_at_once
        if self._asking.count(worker) + self._full.count(worker) >= most:
            raise ProtocolMismatch(f"expected at most {most} requests for prompts at a time, got more")
        if worker in self._by_peer:
            self._asking.append(worker)

    def _let_full_ask(self) -> None:
        """Have workers that held as many groups as they may ask again: one of them may hold another."""
        self._asking.extend(self._full)
        self._full.clear()
        self._changed.wake_all()

    def _turn_away(self, peer: Peer, instruction: WorkerInstruction) -> None:
        """Tell a worker why it gets no place, and end its connection."""
        self._instruct(peer, instruction)
        peer.dismissed = True
        peer.control.shutdown_read()

    def _progress(self, peer: Peer, event: WorkerEvent) -> None:
        """Have a worker's progress handle its event, without text that a terminal would not print."""
        if (worker := self._by_peer.get(peer)) is not None:
            texts = {name: value for name, value in structs.asdict(event).items() if isinstance(value, str)}
            worker.progress.handle(structs.replace(event, **{name: printable(text) for name, text in texts.items()}))

    async def start(self, name: str, worker: Worker) -> JoinedWorker:
        """Tell the worker that has this place, and account for it; see `Spawner`."""
        handle = self._workers[worker.index]
        assert isinstance(handle, JoinedWorker)  # noqa: S101 (see `_give_places`)
        handle.peer.name = name
        self._placed.add(handle.peer)
        self._accounting.open_reported(name, worker)
        address = self._joining.weights
        weights = None
        if address is not None:
            weights = KeylessAddress(address.url, address.local, address.host, address.generation)
        self._instruct(handle.peer, Joined(handle.config, self._ledger.step, weights))
        return handle

    async def run(self, spawning: AbstractAsyncContextManager[Spawner], feed: Feed | None = None) -> None:
        """Give workers their places until the stage is done; see `Supervisor.run`.

        Raises:
            WorkerFailed: the stage raised in a worker.
            WorkersAbsent: there was no worker for too long.
        """
        log.info("workers_may_join", stage=self._name, url=self.receiver.url)
        if self._prompts is not None:  # sampled at a time, and sent and not yet received
            self._accounting.most_held = self._groups_at_once + self.receiver.config.capacity
        try:
            async with spawning as spawner, anyio.create_task_group() as tasks:
                tasks.start_soon(self._limit_absence)
                if self._prompts is not None:
                    tasks.start_soon(self._assign, self._prompts())
                if self._feeder is not None:
                    tasks.start_soon(self._look_for_the_end, self._feeder)
                await self._give_places(spawner, tasks, feed)
                self._over = True
                for peer in self.receiver.peers.values():
                    if peer not in self._placed:
                        self._turn_away(peer, NoneLeft())
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise first_exception(group, PenstockError) from None

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
                sharing = self._on.count if self._prompts is None else 1  # then the first one evaluates for all
                first = self._accounting.evaluates_from
                worker = Worker(place, sharing, self._starts[place], evaluates_from=first)
                self._starts[place] += 1
                handle = JoinedWorker(self._config(peer.name, worker), peer, self.receiver)
                self._workers[place] = self._by_peer[peer] = handle
                tasks.start_soon(self._run_joined, spawner, peer, worker, feed)
            await self._changed.wait()

    @property
    def _complete(self) -> bool:
        """Return whether there is no more work: none is left to give, and no worker has any."""
        if self._workers:
            return False
        if self._feeder is not None:
            return self._feeder.ended
        return self._none_left if self._prompts is not None else len(self._done) == self._on.count

    @property
    def _free_place(self) -> int | None:
        """Return the first place that is free; None where there is none."""
        place = next(place for place in range(sys.maxsize) if place not in self._workers and place not in self._done)
        bounded = self._feeder is None and self._prompts is None
        return None if bounded and place >= self._on.count else place

    def _refusal(self, request: Joins) -> Refused | None:
        if request.digest != self.digest:
            return Refused(
                f"it makes its stage of other content, with the digest {request.digest[:12]}, than the pipeline, with "
                f"{self.digest[:12]}: give it the same configuration and values, or the same script"
            )
        return None

    def _config(self, member: str, worker: Worker) -> StageConfig:
        name = first = f"{self._name} {member}"
        while name in self._names:
            self._joins[first] += 1
            name = f"{first}, restart {self._joins[first]}"
        self._names.add(name)
        return StageConfig(name=name, stage=self._name, worker=worker, channels=self.channels)

    def _name_of(self, index: int, restart: int = 0) -> str:
        del restart
        return self._workers[index].progress.name

    async def _run_joined(self, spawner: Spawner, peer: Peer, worker: Worker, feed: Feed | None) -> None:
        """Run a worker until it has ended.

        Raises:
            WorkerFailed: its stage raised.
        """
        try:
            ended = await self._run_once(spawner, worker, feed)
        finally:
            del self._workers[worker.index], self._by_peer[peer]
            self._changed.wake_all()
        progress = ended.progress
        # 1. Its stage raised: so it would elsewhere, and the run ends.
        if progress.failure is not None:
            raise WorkerFailed(progress.failure.message(ended.exit_reason))
        # 2. Its stage returned: its share of the work is done.
        if progress.finished:
            self._done.add(worker.index)
            return
        # 3. It left, or died: another one may take its place.
        self._last_end = ended.exit_reason
        report = log.info if progress.left else log.warning
        report("worker_left" if progress.left else "worker_died", how=ended.exit_reason, here=len(self._workers))

    async def _limit_absence(self) -> None:
        """End the run where there was no worker for too long.

        Raises:
            WorkersAbsent: saying how the last one ended.
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

    # -- prompts -------------------------------------------------------------------------------------------------------

    async def _assign(self, prompts: AsyncIterator[Assignment]) -> None:
        """Assign one prompt after another, each to the worker that has asked for the longest time."""
        while True:
            # A prompt is admitted when sampling is about to begin; or, to notice the end, when all workers have left.
            while not (self._starts and not self._workers) and not self._asked:
                await self._changed.wait()
            prompt = await anext(prompts, None)
            if prompt is None:
                break
            peer = await self._next_asking()
            self._accounting.assigned(peer.name, prompt.group, prompt.mask)
            self._instruct(peer, Assigned(prompt.number, self._ledger.published))
        self._none_left = True
        self._changed.wake_all()
        while True:
            self._instruct(await self._next_asking(), NoneLeft())

    async def _next_asking(self) -> Peer:
        """Wait until a worker that has a place asks for a prompt."""
        while not self._asked:
            await self._changed.wait()
        return self._asking.popleft()

    @property
    def _asked(self) -> bool:
        """Return whether a worker asks for a prompt; drop those that have ended, or are leaving."""
        while self._asking:
            # There are three cases: it has ended, or is leaving; it holds as many groups as it may; it may have one.
            peer = self._asking[0]
            known = self._by_peer.get(peer)
            if known is not None and not known.progress.leaving.is_set():
                if not self._accounting.is_full(peer.name):
                    return True
                self._full.append(peer)
            self._asking.popleft()
        return False

    def _instruct(self, peer: Peer, instruction: WorkerInstruction) -> None:
        self.receiver.send(peer.identity, Instruction(encode_instruction(instruction)))
