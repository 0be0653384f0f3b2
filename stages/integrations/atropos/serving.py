"""An ASGI application served within the running event loop, for as long as a body lasts. Knows no endpoint."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager

import anyio
import uvicorn
from starlette.types import ASGIApp

__all__ = ["serving"]

PARTING_S = 2
"""How long answers that are under way may take when the server ends: a run that is interrupted ends within five."""

IDLE_S = 75
"""How long a connection is kept on which nothing is asked: longer than clients poll apart."""


class _Server(uvicorn.Server):
    """uvicorn, which leaves the signals to whoever runs the loop, and waits to be ended instead of looking."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ending = anyio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Handle none."""
        yield

    async def main_loop(self) -> None:
        """Serve until `ending`."""
        await self.ending.wait()


@asynccontextmanager
async def serving(application: ASGIApp, listener: socket.socket) -> AsyncGenerator[None]:
    """Serve `application` at `listener` within the body; then finish what is under way, within `PARTING_S`."""
    server = _Server(
        uvicorn.Config(
            application,
            loop="none",
            ws="none",
            lifespan="off",
            log_config=None,  # the process has a configuration of its own
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=PARTING_S,
        )
    )
    with contextlib.closing(listener):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_to_its_end, server, listener)
            try:
                yield
            finally:
                server.ending.set()


async def _to_its_end(server: uvicorn.Server, listener: socket.socket) -> None:
    """Also where the body was cancelled: what is under way is finished."""
    with anyio.CancelScope(shield=True):
        await server.serve([listener])
