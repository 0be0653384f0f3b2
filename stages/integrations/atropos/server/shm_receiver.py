"""A channel beside the gateway's HTTP server, for environments on this host; its groups enter the same queue.

`ShmReceiver` does not know HTTP: groups arrive decoded, their arrays views of the slots of the environment that
sent them, and releasing a group returns its credit. While the queue has no room for an environment, `ShmIngest`
retains its groups, so that it gets no credit; groups of other environments pass them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Generic, TypeVar

import anyio

from ....._pipeline.accounting.telemetry import get_logger
from ....._pipeline.channels.peer import Peer
from ....._pipeline.channels.remote_receiver import RemoteReceiver
from ....._pipeline.channels.transports import serve
from ....._pipeline.errors import PeerLost
from ....._schemas import TrajectoryGroup
from ..contract import Untrainable
from ..queue.records import QueueFull, RequestRejected, Submission

if TYPE_CHECKING:
    from .endpoints import Endpoints

G = TypeVar("G")

log = get_logger("penstock.atropos")

CAPACITY = 16
"""Groups that each environment may have in flight: as many may be in transit when `/status-env` is answered."""

CAPACITY_BYTES = 16 * 2**20
"""Bytes that each environment may have in flight, and holds as shared memory: 8 × 32,768 tokens with three columns."""

MAX_ENVIRONMENTS = 512

RETRY_S = 1.0
"""Interval of retrying groups without a notification: the time-out of an environment sends none."""


class ShmReceiver:
    """Iterating returns the groups that arrive, each with the id of its environment, or None without one."""

    def __init__(self, inbox: RemoteReceiver[TrajectoryGroup], senders: _Senders) -> None:
        self.url = inbox.url
        """Address that environments connect to."""
        self._inbox = inbox
        self._senders = senders

    def __repr__(self) -> str:
        return f"<ShmReceiver at {self.url}: {self._inbox.statistics().senders} environments>"

    async def __aiter__(self) -> AsyncIterator[tuple[int | None, TrajectoryGroup]]:
        async for group in self._inbox:
            yield _env_id(group), group
            del group  # its slots are free while the next is waited for

    def waiting(self, env_id: int) -> int:
        """Return the number of groups of an environment that arrived and were not taken."""
        return self._senders.waiting(env_id)


class _Senders:
    """Environment ids by connection. A `PeerListener`."""

    def __init__(self) -> None:
        self._env_ids: dict[Peer, int] = {}

    def waiting(self, env_id: int) -> int:
        return sum(peer.sequence - peer.taken for peer, sends_for in self._env_ids.items() if sends_for == env_id)

    def received(self, peer: Peer, record: TrajectoryGroup) -> TrajectoryGroup:
        if (env_id := _env_id(record)) is not None:
            self._env_ids[peer] = env_id
        return record

    def observed(self, peer: Peer, payload: bytes) -> None:
        """Ignore it; see `PeerListener`."""

    def lost(self, peer: Peer, error: PeerLost) -> None:
        log.warning("environment_lost", env_id=self._env_ids.pop(peer, None), reason=str(error))

    def closed(self, peer: Peer) -> None:
        self._env_ids.pop(peer, None)

    def disconnected(self, peer: Peer) -> None:
        """Ignore it; `closed` came before. See `PeerListener`."""


def _env_id(group: TrajectoryGroup) -> int | None:
    env_id = group.meta.get("env_id")
    return env_id if type(env_id) is int else None


@asynccontextmanager
async def open_receiver(
    *,
    capacity: int = CAPACITY,
    capacity_bytes: int = CAPACITY_BYTES,
    max_environments: int = MAX_ENVIRONMENTS,
) -> AsyncIterator[ShmReceiver]:
    """Open a receiver within the `async with`; see `serve` for the bounds. Leaving closes the channel.

    Environments that still send are disconnected, and look for the gateway again.
    """
    senders = _Senders()
    async with serve(
        "shm://",
        TrajectoryGroup,
        capacity=capacity,
        capacity_bytes=capacity_bytes,
        max_senders=max_environments,
        listener=senders,
        name="the gateway",
    ) as inbox:
        inbox.keep_open()
        yield ShmReceiver(inbox, senders)


class ShmIngest(Generic[G]):
    """Takes groups from `receiver` while `run` runs."""

    def __init__(self, receiver: ShmReceiver) -> None:
        self._receiver = receiver
        self._retained: dict[int | None, deque[tuple[TrajectoryGroup, Submission[G]]]] = {}
        """Groups without room, by environment; the sender of a retained group gets no credit for it."""

    @property
    def url(self) -> str:
        """Address that environments connect to."""
        return self._receiver.url

    def waiting(self, env_id: int) -> int:
        """Return the number of groups of an environment that arrived and are not in the queue."""
        return self._receiver.waiting(env_id) + len(self._retained.get(env_id, ()))

    async def run(self, endpoints: Endpoints[G]) -> None:
        """Add every group that arrives to the queue of `endpoints`."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._retry, endpoints)
            async for env_id, group in self._receiver:
                try:
                    submission = await endpoints.submission_of_group(group, env_id)
                except (Untrainable, RequestRejected) as error:
                    endpoints.refuse(env_id, error)
                    continue
                if env_id in self._retained or not _entered(submission, endpoints):
                    self._retained.setdefault(env_id, deque()).append((group, submission))
                del group, submission
                await endpoints.let_pipeline_take()
            tasks.cancel_scope.cancel()

    async def _retry(self, endpoints: Endpoints[G]) -> None:
        while True:
            with anyio.move_on_after(RETRY_S):
                await endpoints.room.wait()
            for env_id, retained in list(self._retained.items()):
                while retained and _entered(retained[0][1], endpoints):
                    retained.popleft()
                if not retained:
                    del self._retained[env_id]


def _entered(submission: Submission[G], endpoints: Endpoints[G]) -> bool:
    """Add a group to the queue, and return whether there was room; one refused for another reason is counted."""
    try:
        endpoints.accept([submission])
    except QueueFull:
        return False
    except RequestRejected as error:
        endpoints.refuse(submission.env_id, error)
    return True
