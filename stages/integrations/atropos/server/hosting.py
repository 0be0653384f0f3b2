"""A gateway while it stands: endpoints, the HTTP server and the way in through shared memory, opened together."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import anyio
import anyio.to_thread

from ..queue.trajectory_queue import TrajectoryQueue
from ..shm.shm_way_in import shm_way_in
from .access import Access, listen
from .app import application
from .bodies import Bodies
from .desk import Desk
from .door import Door
from .endpoints import Endpoints
from .intake import Intake
from .serving import serving

__all__ = ["Hosted", "hosted"]

G = TypeVar("G")


@dataclass(frozen=True, slots=True)
class Hosted(Generic[G]):
    """What stands."""

    endpoints: Endpoints[G]
    url: str
    """Where it listens."""


@asynccontextmanager
async def hosted(door: Door, queue: TrajectoryQueue[G], desk: Desk[G]) -> AsyncGenerator[Hosted[G]]:
    """Serve `queue` at `door` within the body.

    Raises:
        InvalidConfig: the host is beyond loopback, and there is no token.
        OSError: the host is unknown, or the port is taken.
    """
    access = Access(door.token, door.host, door.cors)
    async with AsyncExitStack() as stack:
        listener = await anyio.to_thread.run_sync(listen, door.host, door.port, access)
        stack.callback(listener.close)
        host, port = listener.getsockname()[:2]
        intake: Intake[G] | None = None
        if desk.takes_groups:
            intake = Intake(await stack.enter_async_context(shm_way_in(capacity_bytes=door.shm_bytes)))
        endpoints = Endpoints(queue, desk, Bodies(door.limits), intake=intake)
        await stack.enter_async_context(serving(application(endpoints, access), listener))
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        if intake is not None:
            tasks.start_soon(intake.run, endpoints)
        yield Hosted(endpoints, f"http://{f'[{host}]' if ':' in host else host}:{port}")
