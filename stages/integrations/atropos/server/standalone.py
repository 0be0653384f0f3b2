"""The gateway as a server of its own: environments and trainers talk HTTP to it, and no pipeline is behind it."""

from __future__ import annotations

import signal
from collections.abc import Callable

import anyio

from ..queue.trajectory_queue import TrajectoryQueue
from .desk import Relay
from .door import Door
from .opening import opened

__all__ = ["stand"]


async def stand(door: Door, queue: TrajectoryQueue[bytes], told: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; `told` is called with where, as soon as it listens.

    Raises:
        InvalidConfig: the host is beyond loopback, and there is no token.
        MissingExtra: the packages for an HTTP server are not installed.
        OSError: the host is unknown, or the port is taken.
    """
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with opened(door, queue, Relay(), "penstock gateway") as gateway:
            told(gateway.url)
            async for _ in signals:
                return
