"""Serve a gateway: its server for stages, and `penstock gateway`, where environments and trainers talk HTTP.

`open_server` imports the HTTP server, so that `penstock --help` and a pipeline's description go without it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.to_thread

from ....._pipeline.util.extras import extra
from ....._pipeline.util.signals import handled_stop_signals
from ....._pipeline.util.waiting import Waiters
from ..queue.trajectory_queue import TrajectoryQueue
from .backend import Backend, RelayBackend
from .server_config import ServerConfig

if TYPE_CHECKING:
    from .running import RunningGateway

G = TypeVar("G")


class Listening:
    """The URL of a stage, while it has one. One event loop uses it."""

    def __init__(self) -> None:
        self._url: str | None = None
        self._waiting = Waiters()

    def __repr__(self) -> str:
        return f"<Listening at {self._url}>" if self._url else "<Listening nowhere>"

    async def url(self) -> str:
        """Return the URL as soon as there is one."""
        while self._url is None:
            await self._waiting.wait()
        return self._url

    @contextmanager
    def at(self, url: str) -> Iterator[None]:
        """Set the URL within the body."""
        self._url = url
        self._waiting.wake_all()
        try:
            yield
        finally:
            self._url = None


@asynccontextmanager
async def open_server(
    config: ServerConfig, queue: TrajectoryQueue[G], backend: Backend[G], name: str
) -> AsyncGenerator[RunningGateway[G]]:
    """Serve `queue` within the body; `name` is for errors.

    Raises:
        MissingExtra: the packages for an HTTP server are not installed.
        InvalidConfig: the host is beyond loopback and there is no token, or the certificate cannot be used.
        OSError: the host is unknown, or the port is taken.
    """
    await anyio.to_thread.run_sync(_import_server, name)
    from .running import run_server  # noqa: PLC0415 (needs packages of an extra)

    async with run_server(config, queue, backend) as running:
        yield running


def _import_server(name: str) -> None:
    """Import the server, or raise MissingExtra. Blocks."""
    with extra("gateway", name):
        import_module(f"{__package__}.running")


async def serve(config: ServerConfig, queue: TrajectoryQueue[bytes], on_listening: Callable[[str], None]) -> None:
    """Serve until a stop signal arrives; `on_listening` is called with the URL.

    Raises:
        MissingExtra: the packages for an HTTP server are not installed.
        InvalidConfig: the host is beyond loopback and there is no token, or the certificate cannot be used.
        OSError: the host is unknown, or the port is taken.
    """
    with anyio.open_signal_receiver(*handled_stop_signals()) as signals:
        async with open_server(config, queue, RelayBackend(), "penstock gateway") as running:
            on_listening(running.url)
            async for _ in signals:
                return
