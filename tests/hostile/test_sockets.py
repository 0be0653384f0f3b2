"""ZeroMQ aborts a process of which a socket stops reading at a high-water mark, when a flooding peer has gone.

So no socket that other processes connect to has one; a port bounds what waits there by itself (`test_dying_floods`).
"""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import zmq
from tests.ports import two_free_ports

from penstock import TrajectoryGroup
from penstock._stages.integrations.prime_rl.transports import ZmqTransport
from penstock.channels import connect, serve
from penstock.weights import WeightPublisher, WeightSubscriber


def open_sockets() -> list[zmq.Socket[bytes]]:
    """Return the sockets of this process that may have connections to others."""
    found = [each for each in gc.get_objects() if issubclass(type(each), zmq.Socket) and not each.closed]
    return [each for each in found if not each.getsockopt_string(zmq.LAST_ENDPOINT).startswith("inproc:")]


@asynccontextmanager
async def channel(url: str) -> AsyncIterator[None]:
    async with serve(url, TrajectoryGroup) as inbox, connect(inbox.url, TrajectoryGroup):
        yield


@asynccontextmanager
async def weights() -> AsyncIterator[None]:
    tensors = {"weight": np.ones(4, np.float32)}
    async with (
        WeightPublisher(tensors) as publisher,
        publisher.serve("tcp://127.0.0.1:0") as address,
        WeightSubscriber(replace(address, host="another")),
    ):
        yield


@asynccontextmanager
async def prime_rl() -> AsyncIterator[None]:
    transport = ZmqTransport(f"tcp://127.0.0.1:{two_free_ports()}", ranks=0)
    try:
        transport.send(0, [], timeout_s=0)
        yield
    finally:
        transport.close()


OPENED: dict[str, Callable[[], AbstractAsyncContextManager[None]]] = {
    "shm": lambda: channel("shm://"),
    "tcp": lambda: channel("tcp://127.0.0.1:0"),
    "weights": weights,
    "prime-rl": prime_rl,
}


@pytest.mark.parametrize("name", OPENED)
async def test_no_socket_stops_reading_at_a_high_water_mark(name: str) -> None:
    before = open_sockets()

    async with OPENED[name]():
        marks = [each.getsockopt(zmq.RCVHWM) for each in open_sockets() if each not in before]

    assert marks == [0, 0]
