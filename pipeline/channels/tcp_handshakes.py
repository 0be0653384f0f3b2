"""Connections to a tcp port that have not completed the handshake: which ones are closed, and how.

Shared by the ports of channels and of published weights. Decides only; knows neither keys nor messages.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol, TypeVar

from .tcp_connection import TcpConnection

LARGEST_HANDSHAKE_MESSAGE = 64 * 1024
"""Bytes: the messages of a handshake are short."""

MOST_OF_HANDSHAKE = 2 * LARGEST_HANDSHAKE_MESSAGE
"""Bytes that a peer sends until its handshake is complete, at most."""


class Pending(Protocol):
    """A connection that has not completed the handshake."""

    host: str
    """The other side's address."""


P = TypeVar("P", bound=Pending)


def excess(pending: Iterable[P], most: int) -> list[P]:
    """Return the connections to close where more than `most` are pending.

    Each is the oldest of the address with the most, because an honest one is hardly ever the oldest.

    Args:
        pending: the oldest first.
        most: how many may be pending.
    """
    by_host: defaultdict[str, deque[P]] = defaultdict(deque)
    count = 0
    for connection in pending:
        by_host[connection.host].append(connection)
        count += 1
    return [max(by_host.values(), key=len).popleft() for _ in range(count - most)]


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
