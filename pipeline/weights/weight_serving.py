"""Opens the port of published weights: binds its socket with a key, and serves mirrors of other hosts meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import anyio
import anyio.to_thread
import zmq

from ..channels.keys import ChannelKey
from ..channels.tcp_address import bind, bracketed, resolved
from ..channels.tcp_handshakes import LARGEST_HANDSHAKE_MESSAGE
from ..channels.transport import router
from ..errors import InvalidConfig
from ..util.file_descriptors import available
from ..util.host import host_identity
from .weight_address import WeightAddress
from .weight_server import WeightServer
from .weight_subscriptions import Subscriptions
from .weights import WeightWriter

DESCRIPTORS = 17
"""File descriptors that serving takes: the socket, temporary ones, and those of ZeroMQ itself, once."""


@asynccontextmanager
async def serving(
    url: str,
    key: ChannelKey | None,
    heartbeat_timeout_s: float,
    writer: WeightWriter,
    subscriptions: Subscriptions,
    *,
    trusted_link: bool,
) -> AsyncIterator[WeightAddress]:
    """Serve the versions of `writer` to other hosts within the body; see `WeightPublisher.serve`."""
    if writer.handle is not None:
        raise InvalidConfig(
            f"device: expected versions in memory of the host, which other hosts can receive, got some on "
            f"{writer.handle.device}: publish with device='cpu'"
        )
    available(DESCRIPTORS, "weights over tcp")
    place = await anyio.to_thread.run_sync(partial(resolved, url, key, encrypted=not trusted_link))
    host = await anyio.to_thread.run_sync(host_identity)
    socket = router()
    try:
        socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_HANDSHAKE_MESSAGE)  # longer ones are of no mirror
        place.protect(socket, "receiver")
        port = bind(socket, place)
        served = f"tcp://{bracketed(place.host)}:{port}"
        server = WeightServer(
            socket,
            served,
            port,
            key=place.key,
            heartbeat_timeout_s=heartbeat_timeout_s,
            writer=writer,
            subscriptions=subscriptions,
        )
    except BaseException:
        socket.close(linger=0)
        raise
    stack = AsyncExitStack()
    stack.push_async_callback(server.aclose)
    try:
        server.tasks = server.deltas.tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(server.tasks.cancel_scope.cancel)
        await anyio.to_thread.run_sync(server.acceptor.watch.start)
        local = subscriptions.url
        yield WeightAddress(served, place.key, local, host, writer.generation, heartbeat_timeout_s, trusted_link)
    finally:
        await stack.aclose()  # not `async with`: the task group would wrap exceptions of the body
