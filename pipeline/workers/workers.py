"""A stage in processes: its workers, their accounting, and the channels to and from them.

All workers send on one channel. Each worker of a middle stage receives on a channel of its own: records are sent to the
workers as they have credit, so a slow worker gets fewer.
"""

from __future__ import annotations

import secrets
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from typing import Any

import anyio
import anyio.to_thread
from msgspec import structs

from ..accounting.end_states import EndState
from ..accounting.telemetry import WaitAggregator
from ..channels.channel import ReceiveChannel, SendChannel
from ..channels.heartbeat import DEFAULT_HEARTBEAT_TIMEOUT_S
from ..channels.keys import SECRET_BYTES, ChannelKey
from ..channels.merged_receiver import AnyReceiver, MergedReceiver
from ..channels.remote_receiver import RemoteReceiver
from ..channels.tcp_address import bracketed
from ..channels.transports import connect, serve
from ..errors import NobodyListens, ProtocolMismatch
from ..graph.context import Context
from ..graph.edge import EdgeCounter
from ..graph.placement import Joining, Processes, Ray, Remote
from ..graph.record_types import wire_type
from ..graph.stage_info import info_of
from ..graph.stage_node import StageNode
from ..graph.statistics import WorkerStatistics
from ..util.cancelling import cancelled_after
from ..util.file_descriptors import reserved
from ..util.host import host_identity
from .join import digest_of_main, key_of
from .joined_workers import JoinedWorkers
from .supervisor import Spawner, Supervisor
from .worker_accounting import WorkerAccounting
from .worker_messages import WorkerChannels
from .worker_process import ProcessSpawner
from .worker_stage import WithTokenizer

WORKER_HEARTBEAT_TIMEOUT_S = DEFAULT_HEARTBEAT_TIMEOUT_S
"""Seconds that a worker may be unresponsive on its output channel before it is killed. The other ends wait without
bound: a worker waits for its parent while that exists, and its feed waits for the worker, which may be loading a
model."""

WORKER_DESCRIPTORS, FEED_DESCRIPTORS, SPARE_DESCRIPTORS = 5, 6, 5
"""File descriptors of a worker in this process (pidfd, watch, place, control connection, socket), of its feed, and of a
stage while it starts one."""

MOST_JOINED = 16_384
"""Workers that may join a stage at a time; the descriptors of the process bound them before."""

_UNREACHABLE = (NobodyListens, ProtocolMismatch, ValueError, socket.gaierror)
"""The exceptions of a feed whose worker has named a URL where it does not serve an inbox."""

_WORKER_DIED = (anyio.BrokenResourceError, anyio.EndOfStream)
"""The exceptions of a feed whose worker died; the supervisor reports the death and its reason."""


class Workers:
    """The workers of one stage."""

    def __init__(
        self,
        node: StageNode,
        on: Remote,
        context: Context,
        counter: EdgeCounter,
        *,
        before: StageNode | None,
        after: StageNode,
    ) -> None:
        self._node = node
        self._on = on
        self._after = after
        """The stage that receives their records."""
        self._waits = WaitAggregator(context.metrics, node.name)
        """Receives their metrics."""
        self._ledger = context.ledger
        self._schedule = context.schedule
        self._tokenizer = context.tokenizer
        self._info = info = info_of(node.stage)
        assign = info.assign if before is None else None
        self._assigned = assign is not None
        self._accounting = WorkerAccounting(
            context.ledger, self._waits, counter, source=before is None, assigned=self._assigned
        )
        self._feeder = None if before is None else _Feeder(before, self._accounting)
        """Sends records to them; None for a source."""
        supervisor = JoinedWorkers if isinstance(on, Joining) else Supervisor
        self._supervisor: Supervisor = supervisor(
            node.name, on, self._accounting, context.ledger, assign=assign, groups_at_once=info.groups_at_once
        )
        self._accounting.on_unresponsive = self._supervisor.kill
        self._accounting.on_event = self._supervisor.handle
        self._spawning: Callable[[], AbstractAsyncContextManager[Spawner]]
        """Returns their spawner, within `serve`."""
        self._watched: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
        """Ends the body if the cluster of the workers is lost."""
        self._receiver: AnyReceiver
        """The channel that they send on; open within `serve`."""
        self._reserved: ExitStack
        """Reserved file descriptors for them, from `serve` until they run."""

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[AnyReceiver]:
        """Open the channels that they send on, for the stage after them.

        Raises:
            OutOfFileDescriptors: this process may not open as many files as they take.
            MissingExtra, ClusterUnreachable, PlacementTimedOut: there is no place for them on Ray.
            InvalidKey, KeyUnavailable, OSError: the key of those that join cannot be used, or their port is in use.
        """
        async with AsyncExitStack() as stack:
            match self._on:
                case Ray():
                    self._receiver = await self._on_ray(stack, self._on)
                case Joining():
                    self._receiver = await self._joined(stack, self._on)
                case Processes():
                    self._receiver = await self._in_processes(stack, self._on)
            self._receiver.keep_open()  # workers may be restarted, so the number of senders is not known
            purpose = f"the workers of {self._node.name} ({self._on.count})"
            with reserved(self._descriptors, purpose, ", or run fewer workers") as self._reserved:
                yield self._receiver

    async def _in_processes(self, stack: AsyncExitStack, on: Processes) -> AnyReceiver:
        """Open the channel of workers in processes of this host."""
        receiver = await stack.enter_async_context(self._served("shm://"))
        self._supervisor.channels = self._channels(receiver.url)
        self._spawning = lambda: ProcessSpawner(self._pickled, on.python)
        return receiver

    async def _on_ray(self, stack: AsyncExitStack, on: Ray) -> AnyReceiver:
        """Reserve places on Ray, and open a channel for actors on this host, and one for those on others."""
        from . import ray_cluster, ray_spawner, ray_worker  # noqa: PLC0415 (Ray is an extra)

        reservation = await stack.enter_async_context(ray_cluster.reserved(on, self._node.name))
        self._watched = reservation.head.watched
        secret = secrets.token_bytes(SECRET_BYTES)
        here = await stack.enter_async_context(self._served("shm://"))
        address = await ray_cluster.in_thread(ray_worker.node_address)
        host = await ray_cluster.in_thread(host_identity)
        elsewhere = await stack.enter_async_context(
            self._served(f"tcp://{bracketed(address)}:0", key=ChannelKey(secret))
        )
        self._supervisor.channels = structs.replace(
            self._channels(here.url), remote_url=elsewhere.url, key=secret.hex(), host=host
        )
        if self._feeder is not None:
            self._feeder.key = ChannelKey(secret)
        self._spawning = lambda: ray_spawner.RaySpawner(self._pickled, on, reservation)
        return MergedReceiver[Any]([here, elsewhere])

    @property
    def _pickled(self) -> object:
        """Return what is pickled to a worker: the stage, with the tokenizer of the pipeline where it needs that."""
        stage = self._node.stage
        return WithTokenizer(stage, self._tokenizer) if self._info.needs_tokenizer else stage

    async def _joined(self, stack: AsyncExitStack, on: Joining) -> AnyReceiver:
        """Open the channel of workers that join by themselves."""
        supervisor = self._supervisor
        assert isinstance(supervisor, JoinedWorkers)  # noqa: S101 (see `__init__`)
        key = await anyio.to_thread.run_sync(key_of, on.key)
        supervisor.digest = on.digest or await anyio.to_thread.run_sync(digest_of_main)
        receiver = await stack.enter_async_context(self._served(on.url, key=key, max_senders=MOST_JOINED))
        supervisor.receiver, supervisor.channels = receiver, self._channels(receiver.url)
        if self._assigned and not self._info.nodes:  # sampled at a time, and sent and not yet received
            self._accounting.most_held = self._info.groups_at_once + receiver.config.capacity
        if self._feeder is not None:
            supervisor.feeder = self._feeder
            self._feeder.key, self._feeder.heartbeat_timeout_s = key, WORKER_HEARTBEAT_TIMEOUT_S
        self._spawning = lambda: nullcontext(supervisor)
        return receiver

    def _served(
        self, url: str, key: ChannelKey | None = None, max_senders: int | None = None
    ) -> AbstractAsyncContextManager[RemoteReceiver[Any]]:
        return serve(
            url,
            wire_type(self._node.stage),
            capacity=self._after.remote_capacity,
            capacity_bytes=self._after.remote_capacity_bytes,
            max_senders=max_senders or self._on.count * (2 if self._on.restarts else 1),
            listener=self._accounting,
            name=self._after.name,
            key=key,
            heartbeat_timeout_s=WORKER_HEARTBEAT_TIMEOUT_S,
        )

    @property
    def _descriptors(self) -> int:
        each = WORKER_DESCRIPTORS + (FEED_DESCRIPTORS if self._feeder else 0)
        return SPARE_DESCRIPTORS + each * self._on.count

    async def run(self, inbox: ReceiveChannel[Any] | None) -> None:
        """Run the workers until all have finished, on the records of `inbox`, within `serve`.

        Raises:
            WorkerFailed: the stage raised in a worker, or a worker died more often than it may be restarted.
            ClusterLost: the head of their Ray cluster was lost.
        """
        self._reserved.close()  # every stage has reserved its own by now
        feed = None
        if self._feeder is not None and inbox is not None:
            self._feeder.inbox, feed = inbox, self._feeder.feed
        with self._ledger.on_step(self._notify_of_step):
            async with self._watched():
                await self._supervisor.run(self._spawning(), feed)
        self._receiver.let_end()

    def _notify_of_step(self, step: int) -> None:
        """Notify the workers of a source of a step, also those without a trajectory that it trained."""
        if self._feeder is None:
            for peer in self._receiver.peers:
                peer.stepped(step, self._ledger.published)

    def _channels(self, outbox_url: str) -> WorkerChannels:
        return WorkerChannels(
            outbox_url=outbox_url,
            outbox_kind=wire_type(self._node.stage).schema.kind,
            inbox_kind=self._feeder.record_type.schema.kind if self._feeder else "",
            inbox_capacity=self._node.remote_capacity,
            inbox_capacity_bytes=self._node.remote_capacity_bytes,
            assigned=self._assigned,
            schedule=self._schedule,
        )

    @property
    def groups_held(self) -> int:
        """Return the number of groups that they hold."""
        return self._accounting.groups_held

    def statistics(self) -> tuple[WorkerStatistics, ...]:
        """Return the state of the workers now."""
        return self._supervisor.statistics()

    @property
    def waited(self) -> tuple[float, float]:
        """The seconds that they have waited, added up, for records and for credit, as of their last reports."""
        return self._waits.waited

    def close(self, state: EndState, reason: str) -> None:
        """Count the end of the trajectories that they still hold, at the end of the run."""
        self._accounting.close(state, reason)
        if self._feeder is not None:
            self._feeder.close()


class _Feeder:
    """Sends records to the workers of a middle stage."""

    def __init__(self, before: StageNode, accounting: WorkerAccounting) -> None:
        self.accounting = accounting
        self.record_type = wire_type(before.stage)
        self.inbox: ReceiveChannel[Any]
        """The channel of the records; all workers share it."""
        self.key: ChannelKey | None = None
        """The key of workers that are reached over tcp."""
        self.heartbeat_timeout_s: float | None = None
        """Bound on the silence of a worker; None for one that may be loading a model."""
        self._inbox_ended = False
        self._unsent: deque[Any] = deque()
        """Records that could not be sent to a worker because it died: another worker gets them."""

    async def feed(self, worker: str, url: str, leaving: anyio.Event) -> str:
        """Send records to `worker` at `url`, and close its inbox; see `Feed`."""
        try:
            key = self.key if url.startswith("tcp://") else None
            name, bound_s = f"feed of {worker}", self.heartbeat_timeout_s
            async with AsyncExitStack() as stack:
                connecting = connect(url, self.record_type, name=name, key=key, heartbeat_timeout_s=bound_s)
                try:
                    outbox = await stack.enter_async_context(connecting)
                except _UNREACHABLE as error:
                    return str(error)
                async with cancelled_after(leaving.wait):
                    await self._send_all(worker, outbox)
        except _WORKER_DIED:
            pass  # the supervisor reports it
        return ""

    async def _send_all(self, worker: str, outbox: SendChannel[Any]) -> None:
        """Send records until there are no more, or the worker has died."""
        with suppress(*_WORKER_DIED):
            while (record := await self._next()) is not None:
                await self._send(worker, record, outbox)
                del record  # it must not occupy its slots until the next one arrives

    async def look(self) -> None:
        """Receive one record for the worker that is fed next, or notice that there are no more."""
        if (record := await self._next()) is not None:
            self._unsent.append(record)

    async def _next(self) -> Any:
        if not self._unsent:
            try:
                return await self.inbox.receive()
            except anyio.EndOfStream:
                self._inbox_ended = True
        return self._unsent.popleft() if self._unsent else None

    @property
    def ended(self) -> bool:
        """Return whether there are no more records."""
        return self._inbox_ended and not self._unsent

    @property
    def waiting(self) -> bool:
        """Return whether records wait for a worker."""
        return bool(self._unsent)

    async def _send(self, worker: str, record: Any, outbox: SendChannel[Any]) -> None:
        self.accounting.handed(worker, record)
        try:
            await outbox.send(record)
        except BaseException:
            self.accounting.returned(worker, record)
            self._unsent.append(record)
            raise

    def close(self) -> None:
        """Drop the records that no worker received, so that their slots are released."""
        self._unsent.clear()
