"""ShmReceiver: a channel beside the gateway's HTTP server, for environments on this host.

Groups come decoded, their arrays views of the slots of the environment that sent them. Releasing a group returns its
credit, so keep `group.owned()` of one that is needed for longer. Knows nothing about HTTP: the gateway answers `url`
at `PATH`, and adds `waiting` to what `/status-env` answers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from .....pipeline.channels.carriers import serve
from .....pipeline.channels.peer import Peer
from .....pipeline.channels.remote_receiver import RemoteReceiver
from .....pipeline.errors import PeerLost
from .....pipeline.telemetry import get_logger
from .....schemas import TrajectoryGroup

__all__ = ["PATH", "ShmAnswer", "ShmReceiver", "open_receiver"]

log = get_logger("penstock.atropos")

PATH = "/shm"
"""Where the gateway answers a GET with the address."""

CAPACITY = 16
"""Groups that each environment may have in flight: as many may be on their way here when `/status-env` is answered."""

CAPACITY_BYTES = 16 * 2**20
"""Bytes that each environment may have in flight, and holds as shared memory: 8 × 32,768 tokens with three columns."""

MAX_ENVIRONMENTS = 512


class ShmAnswer(msgspec.Struct, frozen=True):
    """Answers GET /shm."""

    url: str
    """Argument of `connect`."""


class ShmReceiver:
    """Iterating returns the groups that come, each with the id of its environment, or None if it has none."""

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
        """Return the number of groups of an environment that have come and were not taken."""
        return self._senders.waiting(env_id)


class _Senders:
    """Which connection sends for which environment. A `PeerListener`."""

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

    def parted(self, peer: Peer) -> None:
        self._env_ids.pop(peer, None)

    def departed(self, peer: Peer) -> None:
        """Ignore it; `parted` came before. See `PeerListener`."""


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

    Environments that still send learn of it, and look for the gateway again.
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
