"""The gateway's way in through shared memory: a channel beside the HTTP server, for environments on this host.

Groups come decoded, their arrays views of the slots of the environment that sent them; letting go of one gives it its
credit back, so whoever keeps them longer than a moment keeps `group.owned()`. Knows nothing about HTTP: the gateway
tells environments `url` under `PATH`, and counts `waiting` into what `/status-env` says.
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

__all__ = ["PATH", "ShmWayIn", "WayInAnswer", "shm_way_in"]

log = get_logger("penstock.atropos")

PATH = "/shm"
"""Where the gateway tells environments about it, by GET."""

CAPACITY = 16
"""Groups that each environment may have in flight: so many may be on their way here when `/status-env` is asked."""

CAPACITY_BYTES = 16 * 2**20
"""Bytes that each environment may have in flight, and holds as shared memory: 8 × 32,768 tokens with three columns."""

MAX_ENVIRONMENTS = 512

KEY_OF_ENV_ID = "env_id"
"""Under which `meta` of a group holds who sent it."""


class WayInAnswer(msgspec.Struct, frozen=True):
    """Answers GET /shm."""

    url: str
    """What to `connect` to."""


class ShmWayIn:
    """Iterating gives the groups that come, each with the id of its environment, or None if it has none."""

    def __init__(self, inbox: RemoteReceiver[TrajectoryGroup], senders: _Senders) -> None:
        self.url = inbox.url
        """What environments `connect` to."""
        self._inbox = inbox
        self._senders = senders

    def __repr__(self) -> str:
        return f"<ShmWayIn at {self.url}: {self._inbox.statistics().senders} environments>"

    async def __aiter__(self) -> AsyncIterator[tuple[int | None, TrajectoryGroup]]:
        async for group in self._inbox:
            yield _sender(group), group
            del group  # its slots are free while the next is waited for

    def waiting(self, env_id: int) -> int:
        """Groups of an environment that have come and were not taken."""
        return self._senders.waiting(env_id)


class _Senders:
    """Who sends for which environment. A `PeerListener`."""

    def __init__(self) -> None:
        self._env_ids: dict[Peer, int] = {}

    def waiting(self, env_id: int) -> int:
        return sum(peer.sequence - peer.taken for peer, sends_for in self._env_ids.items() if sends_for == env_id)

    def received(self, peer: Peer, record: TrajectoryGroup) -> TrajectoryGroup:
        if (env_id := _sender(record)) is not None:
            self._env_ids[peer] = env_id
        return record

    def observed(self, peer: Peer, payload: bytes) -> None:
        """Environments observe nothing that is told here."""

    def lost(self, peer: Peer, error: PeerLost) -> None:
        log.warning("environment_lost", env_id=self._env_ids.pop(peer, None), reason=str(error))

    def parted(self, peer: Peer) -> None:
        self._env_ids.pop(peer, None)

    def departed(self, peer: Peer) -> None:
        """It was told when the environment said goodbye; see `PeerListener`."""


def _sender(group: TrajectoryGroup) -> int | None:
    env_id = group.meta.get(KEY_OF_ENV_ID)
    return env_id if type(env_id) is int else None


@asynccontextmanager
async def shm_way_in(
    *,
    capacity: int = CAPACITY,
    capacity_bytes: int = CAPACITY_BYTES,
    max_environments: int = MAX_ENVIRONMENTS,
) -> AsyncIterator[ShmWayIn]:
    """Open within the `async with`; see `serve` for what the arguments bound. Leaving closes the channel.

    Environments that still send are told so, and look for the gateway again.
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
        yield ShmWayIn(inbox, senders)
