"""A relay between a publisher and the mirrors of other hosts, with their key: it counts, holds, alters and cuts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
import zmq
import zmq.asyncio
from anyio.abc import TaskGroup

from penstock._pipeline.channels.tcp_connection import TcpConnection
from penstock._pipeline.channels.transport import dealer, router
from penstock._schemas.control import Chunk, ChunkRequest, DeltaRequest, Message, SpanDelta, decode, encode
from penstock.weights import WeightAddress


@dataclass
class Relay:
    """Passes on every message, and chunks and deltas through `alter`."""

    upstream: WeightAddress
    requested: list[tuple[int, int]] = field(default_factory=list)
    """Version and index of each chunk that was requested."""
    deltas_requested: list[tuple[int, int, int]] = field(default_factory=list)
    """Version, base and index of each delta that was requested."""
    chunks: list[Chunk | SpanDelta] = field(default_factory=list)
    """Chunks and deltas that were sent to mirrors, as they were sent."""
    on_request: Callable[[], object] = lambda: None
    """Called after each request."""
    alter: Callable[[Any], Any] = lambda chunk: chunk
    """Returns the chunk or delta that is sent instead."""
    flowing: anyio.Event = field(default_factory=anyio.Event)
    """Chunks and deltas wait for it."""
    connections: int = 0
    """Connections of mirrors so far."""
    address: WeightAddress = field(init=False)
    """The address for samplers of another host."""
    _fd: int = -1

    def cut(self) -> None:
        """End the connection of the mirror that sent the last message."""
        with TcpConnection(self._fd) as connection:
            connection.shutdown()

    async def run(self) -> None:
        mirrors = router()
        self.upstream.key.protect(mirrors, "receiver")
        port = mirrors.bind_to_random_port("tcp://127.0.0.1")
        self.address = replace(self.upstream, url=f"tcp://127.0.0.1:{port}", host="another")
        try:
            async with anyio.create_task_group() as tasks:
                await self._pass_up(zmq.asyncio.Socket.from_socket(mirrors), tasks)
        finally:
            mirrors.close(linger=0)

    async def _pass_up(self, mirrors: zmq.asyncio.Socket, tasks: TaskGroup) -> None:
        publishers: dict[bytes, zmq.asyncio.Socket] = {}
        while True:
            identity, frame = await mirrors.recv_multipart(copy=False)
            self._fd = int(identity.get(zmq.SRCFD))
            if identity.bytes not in publishers:
                self.connections += 1
                publishers[identity.bytes] = await tasks.start(self._pass_down, mirrors, identity.bytes)
            await publishers[identity.bytes].send(frame.bytes)
            message = decode(frame.buffer)
            if isinstance(message, ChunkRequest):
                self.requested.append((message.policy_version, message.index))
                self.on_request()
            elif isinstance(message, DeltaRequest):
                self.deltas_requested.append((message.policy_version, message.base_version, message.index))
                self.on_request()

    async def _pass_down(
        self, mirrors: zmq.asyncio.Socket, identity: bytes, *, task_status: anyio.abc.TaskStatus[zmq.asyncio.Socket]
    ) -> None:
        socket = dealer(identity)
        self.upstream.key.protect(socket, "sender")
        socket.connect(self.upstream.url)
        publisher = zmq.asyncio.Socket.from_socket(socket)
        try:
            task_status.started(publisher)
            while True:
                frame = await publisher.recv(copy=False)
                message: Message = decode(frame.buffer)
                if isinstance(message, Chunk | SpanDelta):
                    await self.flowing.wait()
                    altered = self.alter(message)
                    self.chunks.append(altered)
                    message = altered
                with suppress(zmq.ZMQError):  # its connection was cut
                    await mirrors.send_multipart([identity, encode(message)])
        finally:
            socket.close(linger=0)


@asynccontextmanager
async def relay(upstream: WeightAddress, *, flowing: bool = True) -> AsyncIterator[Relay]:
    """Run a relay to `upstream` within the body."""
    made = Relay(upstream)
    if flowing:
        made.flowing.set()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made.run)
        await anyio.lowlevel.checkpoint()
        yield made
        tasks.cancel_scope.cancel()
