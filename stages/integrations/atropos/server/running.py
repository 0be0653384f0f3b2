"""The server of a gateway in the running event loop: its socket, its application, and the other entrance of groups."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import anyio
import anyio.to_thread

from ....._pipeline.errors import InvalidConfig
from ....http.limits import RequestRejections
from ....http.serving import BACKLOG, serving
from ..queue.trajectory_queue import TrajectoryQueue
from .app import application, error_body
from .backend import Backend
from .endpoints import Endpoints, SharedMemory
from .server_config import ServerConfig
from .shm_receiver import ShmIngest, open_receiver

G = TypeVar("G")


@dataclass(frozen=True, slots=True)
class RunningGateway(Generic[G]):
    """A server while it runs."""

    endpoints: Endpoints[G]
    url: str


@asynccontextmanager
async def run_server(
    config: ServerConfig, queue: TrajectoryQueue[G], backend: Backend[G]
) -> AsyncGenerator[RunningGateway[G]]:
    """Serve `queue` within the body; then finish requests in progress, as `serving` does.

    Raises:
        InvalidConfig: the host is beyond loopback and there is no token, or the certificate cannot be used.
        OSError: the host is unknown, or the port is taken.
    """
    async with AsyncExitStack() as stack:
        listener = await anyio.to_thread.run_sync(_listen, config)
        stack.callback(listener.close)
        host, port = listener.getsockname()[:2]
        ingest: ShmIngest[G] | None = None
        if backend.takes_groups:
            ingest = ShmIngest(await stack.enter_async_context(open_receiver(capacity_bytes=config.shm_bytes)))
        refusals = RequestRejections()
        shared = None if ingest is None else SharedMemory(ingest.url, ingest.waiting)
        endpoints = Endpoints(queue, backend, config.limits, refusals, shared=shared)
        app = application(endpoints, config, host)
        server = serving(
            app, listener, config.limits, refusals, error_body, certfile=config.certfile, keyfile=config.keyfile
        )
        await stack.enter_async_context(server)
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        if ingest is not None:
            tasks.start_soon(ingest.run, endpoints)
        scheme = "https" if config.certfile else "http"
        yield RunningGateway(endpoints, f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}")


def _listen(config: ServerConfig) -> socket.socket:
    """Return a socket that listens at the address in `config`. Blocks while it resolves the name."""
    host, port = config.host, config.port
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    if config.token is None and not ipaddress.ip_address(address[0]).is_loopback:
        raise InvalidConfig(
            f"host: expected a loopback address or a token, got {host} and none: any client that reaches the port "
            f"could read and write what is trained; give a token (--token-file, or PENSTOCK_TOKEN), or listen at "
            f"127.0.0.1"
        )
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY for no other
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"{host}:{port}: {error.strerror}; is another gateway running?") from None
    return listener
