"""A gateway while it stands: endpoints, the HTTP server and the way in through shared memory, opened together."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import anyio
import anyio.to_thread

from ....pipeline.telemetry import get_logger
from ....schemas import InvalidRecord
from .access import Access, listen
from .app import application
from .bodies import Bodies
from .desk import Desk
from .door import Door
from .endpoints import Endpoints
from .errors import QueueFull, RefusedByGateway
from .serving import serving
from .shm_way_in import ShmWayIn, shm_way_in
from .state import Books

__all__ = ["Hosted", "hosted"]

G = TypeVar("G")

log = get_logger("penstock.atropos")


@dataclass(frozen=True, slots=True)
class Hosted(Generic[G]):
    """What stands."""

    endpoints: Endpoints[G]
    url: str
    """Where it listens."""


@asynccontextmanager
async def hosted(door: Door, books: Books[G], desk: Desk[G]) -> AsyncGenerator[Hosted[G]]:
    """Serve `books` at `door` within the body.

    Raises:
        InvalidConfig: the host is beyond loopback, and there is no token.
        OSError: the host is unknown, or the port is taken.
    """
    access = Access(door.token)
    async with AsyncExitStack() as stack:
        listener = await anyio.to_thread.run_sync(listen, door.host, door.port, access)
        stack.callback(listener.close)
        host, port = listener.getsockname()[:2]
        way_in = await stack.enter_async_context(shm_way_in()) if desk.takes_groups else None
        endpoints = Endpoints(books, desk, Bodies(door.limits), way_in=way_in)
        await stack.enter_async_context(serving(application(endpoints, access, cors=door.cors), listener))
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        if way_in is not None:
            tasks.start_soon(_take_in, way_in, endpoints)
        yield Hosted(endpoints, f"http://{f'[{host}]' if ':' in host else host}:{port}")


async def _take_in(way_in: ShmWayIn, endpoints: Endpoints[G]) -> None:
    """Groups from shared memory enter the same books; while those are full, their senders wait for credit."""
    async for env_id, group in way_in:
        try:
            submission = await endpoints.heavy(group.nbytes, partial(endpoints.submission_of_group, group, env_id))
            del group
            while True:
                try:
                    endpoints.accept([submission])
                except QueueFull:
                    await endpoints.room.wait()
                else:
                    break
        except (RefusedByGateway, InvalidRecord) as error:
            log.warning("group_refused", env_id=env_id, reason=str(error))
