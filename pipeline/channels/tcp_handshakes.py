"""Connections to a tcp port that have not completed the handshake: which ones are closed, and how.

Shared by the ports of channels and of published weights, and in part by shm. Knows neither keys nor messages.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol, TypeVar

from .tcp_connection import TcpConnection

LARGEST_HANDSHAKE_MESSAGE = 64 * 1024
"""Bytes: the messages of a handshake are short."""

MOST_OF_HANDSHAKE = 2 * LARGEST_HANDSHAKE_MESSAGE
"""Bytes that a peer sends until its handshake is complete, at most."""


SETTLED_S = 1.0
"""Age of a connection from which on it may be closed because there are too many: an honest handshake takes
milliseconds, unless a port is busy with many of them."""

CROWD = 4
"""Times as many connections as may be in handshake that close younger ones too: each holds a file descriptor."""

FAILED = "a connection ended in the handshake: the peer has another key or none, is another program, or left"
"""The reason for which a connection is counted that ended before it sent a message."""


class Pending(Protocol):
    """A connection that has not completed the handshake."""

    host: str
    """The other side's address."""
    since_s: float
    """When the event loop accepted it, by the monotonic clock."""

    @property
    def unserved(self) -> bool:
        """Return whether something that it sent waits to be read here: that it is late is no fault of its peer."""
        ...


P = TypeVar("P", bound=Pending)


def excess(pending: Iterable[P], most: int) -> list[P]:
    """Return the connections to close where more than `most` are pending.

    Each is the oldest of the address with the most, because an honest one is hardly ever the oldest. One that has only
    begun, or that was not served yet, is left until there are `CROWD` times as many.

    Args:
        pending: the oldest first.
        most: how many may be pending.
    """
    by_host: defaultdict[str, deque[P]] = defaultdict(deque)
    for connection in pending:
        by_host[connection.host].append(connection)
    count, begun_s, closed = sum(map(len, by_host.values())), time.monotonic() - SETTLED_S, list[P]()
    while count > most:
        largest = max(by_host.values(), key=len)
        if not largest:
            break
        connection = largest.popleft()
        if count > CROWD * most or (connection.since_s < begun_s and not connection.unserved):
            closed.append(connection)
            count -= 1
    return closed


def is_unserved(fd: int, host: str, port: int | None) -> bool:
    """Return whether ZeroMQ has not read all that came on the connection of `fd` from `host` to `port` of this host."""
    with suppress(OSError), TcpConnection(fd) as tcp:
        return tcp.local_port == port and tcp.host == host and tcp.unread > 0
    return False


def shut_down(fd: int, host: str, port: int | None) -> None:
    """End the connection of `fd` from `host` to `port` of this host, unless the descriptor has become another one."""
    shut_down_flood(fd, host, port, lambda _: True)


def shut_down_flood(fd: int, host: str | None, port: int | None, exceeds: Callable[[int], bool]) -> bool:
    """End the connection of `fd` where `exceeds` finds the bytes too many that it has received, and return whether.

    Not where the descriptor is none of a connection from `host`, None for any, to `port` of this host.
    """
    with suppress(OSError), TcpConnection(fd) as tcp:
        if tcp.local_port == port and host in {None, tcp.host} and exceeds(tcp.bytes_received):
            tcp.shutdown()
            return True
    return False
