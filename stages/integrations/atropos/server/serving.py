"""An ASGI application served within the running event loop, for as long as a body lasts. Knows no endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from http import HTTPStatus

import anyio
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .answers import refused

__all__ = ["serving"]

PARTING_S = 1
"""How long answers that are under way may take when the server ends: a run that is interrupted ends within five."""

IDLE_S = 75
"""How long a connection is kept on which nothing is asked: longer than clients poll apart."""

TURNS_TO_MEET = 3
"""Turns of the loop between accepting a connection and knowing it: its task begins, its transport, its protocol."""

COME_AGAIN = {"Retry-After": "1", "Connection": "close"}


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
        """Serve until `ending`; who was accepted by then is met, and so hung up on, which asyncio's servers forget."""
        await self.ending.wait()
        loop = asyncio.get_running_loop()
        for server in self.servers:
            for listener in server.sockets:
                loop.remove_reader(listener.fileno())
        for _ in range(TURNS_TO_MEET):
            await asyncio.sleep(0)


def _parting(application: ASGIApp) -> ASGIApp:
    """`application`, which tells those whom it waits for when the server ends to come again."""

    async def answering(scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await application(scope, receive, sending)
        except asyncio.CancelledError:  # by uvicorn, when PARTING_S are over; raised, it would be logged as a failure
            if not started:
                await refused(HTTPStatus.SERVICE_UNAVAILABLE, "the gateway ends: come again", COME_AGAIN)(
                    scope, receive, send
                )

    return answering


@asynccontextmanager
async def serving(application: ASGIApp, listener: socket.socket) -> AsyncGenerator[None]:
    """Serve `application` at `listener` within the body; then finish what is under way, within `PARTING_S`."""
    server = _Server(
        uvicorn.Config(
            _parting(application),
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
