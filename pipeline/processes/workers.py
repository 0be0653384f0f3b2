"""A stage in processes, as the run sees it: its workers, their books, and the channels that lead to and from them.

Behind the workers is one channel, on which all of them send. Before each worker of a middle stage is one of its own:
records are handed on as the workers have credit for them, so a slow worker gets fewer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any

import anyio

from ..channels.channel import REMOTE_CAPACITY, REMOTE_CAPACITY_BYTES, ReceiveChannel, SendChannel
from ..channels.heartbeat import DEFAULT_HEARTBEAT_TIMEOUT_S
from ..channels.remote_receiver import RemoteReceiver
from ..channels.transports import connect, serve
from ..context import Context
from ..edge import EdgeCounter
from ..errors import NobodyListens
from ..file_descriptors import reserved
from ..stage_node import StageNode, wire_type
from ..statistics import WorkerStatistics
from ..telemetry import WaitAggregator
from .placement import Processes
from .supervisor import Supervisor
from .worker_accounting import WorkerAccounting
from .worker_messages import WorkerChannels

__all__ = ["Workers"]

WORKER_HEARTBEAT_TIMEOUT_S = DEFAULT_HEARTBEAT_TIMEOUT_S
"""How long a worker may be unresponsive on its output channel before it is killed. The other ends wait without bound: a
worker waits for its parent as long as that exists, and its feed waits for the worker, which may be loading a model."""

WORKER_DESCRIPTORS, FEED_DESCRIPTORS, SPARE_DESCRIPTORS = 4, 6, 5
"""File descriptors that a worker takes here (its process, its word, its door, its socket), that its feed takes, and
that a stage takes for a moment while it starts one."""

_WORKER_GONE = (NobodyListens, anyio.BrokenResourceError, anyio.EndOfStream)
"""What a feed meets when its worker dies; that it died, and how, the supervisor says."""


class Workers:
    """The workers of one stage."""

    def __init__(
        self,
        node: StageNode,
        on: Processes,
        context: Context,
        counter: EdgeCounter,
        *,
        before: StageNode | None,
        after: StageNode,
    ) -> None:
        self._node = node
        self._on = on
        self._after = after
        """The stage that receives what they send."""
        self._heard = WaitAggregator(context.metrics, node.name)
        """Where their metrics arrive."""
        self._accounting = WorkerAccounting(context.ledger, self._heard, counter, source=before is None)
        self._feeder = None if before is None else _Feeder(before, self._accounting)
        """Hands records to them; None for a source."""
        self._supervisor = Supervisor(node.name, node.stage, on, self._accounting)
        self._accounting.on_unresponsive = self._supervisor.kill
        self._receiver: RemoteReceiver[Any]
        """Where they send; open within `serve`."""
        self._held: ExitStack
        """File descriptors that they will need, from `serve` until they run."""

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[RemoteReceiver[Any]]:
        """Open the channel on which they send, for the stage after them.

        Raises:
            OutOfFileDescriptors: this process may not open as many files as they take.
        """
        async with serve(
            "shm://",
            wire_type(self._node.stage),
            capacity=self._after.capacity or REMOTE_CAPACITY,
            capacity_bytes=self._after.capacity_bytes or REMOTE_CAPACITY_BYTES,
            max_senders=self._on.count * (2 if self._on.restarts else 1),
            listener=self._accounting,
            name=self._after.name,
            heartbeat_timeout_s=WORKER_HEARTBEAT_TIMEOUT_S,
        ) as self._receiver:
            self._receiver.keep_open()  # workers die and are started anew, so how many will come and go is not known
            purpose = f"the workers of {self._node.name} ({self._on.count})"
            with reserved(self._descriptors, purpose, ", or run fewer workers") as self._held:
                yield self._receiver

    @property
    def _descriptors(self) -> int:
        each = WORKER_DESCRIPTORS + (FEED_DESCRIPTORS if self._feeder else 0)
        return SPARE_DESCRIPTORS + each * self._on.count

    async def run(self, inbox: ReceiveChannel[Any] | None) -> None:
        """Run them until all have finished, on the records of `inbox`, within `serve`.

        Raises:
            WorkerFailed: the stage raised in a worker, or a worker died once too often.
        """
        self._held.close()  # every stage has held its own by now
        feed = None
        if self._feeder is not None and inbox is not None:
            self._feeder.inbox, feed = inbox, self._feeder.feed
        await self._supervisor.run(self._channels(self._receiver.url), feed)
        self._receiver.let_end()

    def _channels(self, outbox_url: str) -> WorkerChannels:
        return WorkerChannels(
            outbox_url=outbox_url,
            outbox_kind=wire_type(self._node.stage).schema.kind,
            inbox_kind=self._feeder.record_type.schema.kind if self._feeder else "",
            inbox_capacity=self._node.capacity or REMOTE_CAPACITY,
            inbox_capacity_bytes=self._node.capacity_bytes or REMOTE_CAPACITY_BYTES,
        )

    def statistics(self) -> tuple[WorkerStatistics, ...]:
        """Return the workers now."""
        return self._supervisor.statistics()

    @property
    def waited(self) -> tuple[float, float]:
        """Seconds that they have waited, added up, for records and for credit, as they told with their last records."""
        return self._heard.waited

    def close(self) -> None:
        """The run is over: what they still hold is lost."""
        self._accounting.close()
        if self._feeder is not None:
            self._feeder.close()


class _Feeder:
    """Hands records to the workers of a middle stage."""

    def __init__(self, before: StageNode, accounting: WorkerAccounting) -> None:
        self.accounting = accounting
        self.record_type = wire_type(before.stage)
        self.inbox: ReceiveChannel[Any]
        """Where the records come from; all workers share it."""
        self._unhanded: deque[Any] = deque()
        """Records that could not be handed to a worker because it died: the next one gets them."""

    async def feed(self, worker: str, url: str) -> None:
        """Hand records to `worker`, which serves `url`, until there are no more, or it is gone."""
        with suppress(*_WORKER_GONE):
            async with connect(url, self.record_type, name=f"feed of {worker}", heartbeat_timeout_s=None) as outbox:
                while (record := await self._next()) is not None:
                    await self._hand(worker, record, outbox)
                    del record  # what is handed on must not hold its slots until the next one comes

    async def _next(self) -> Any:
        if not self._unhanded:
            with suppress(anyio.EndOfStream):
                return await self.inbox.receive()
        return self._unhanded.popleft() if self._unhanded else None

    async def _hand(self, worker: str, record: Any, outbox: SendChannel[Any]) -> None:
        self.accounting.handed(worker, record)
        try:
            await outbox.send(record)
        except BaseException:
            self.accounting.returned(worker, record)
            self._unhanded.append(record)
            raise

    def close(self) -> None:
        """Nobody will get what could not be handed over: let go of the slots that it lies in."""
        self._unhanded.clear()
