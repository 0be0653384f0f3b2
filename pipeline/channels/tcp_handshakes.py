"""Connections to a tcp port that have not completed the handshake: the bytes that they may send, and their end.

Shared by the ports of channels and of published weights. Knows neither keys nor messages.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from .tcp_connection import TcpConnection

LARGEST_HANDSHAKE_MESSAGE = 64 * 1024
"""Bytes: the messages of a handshake are short."""

MOST_OF_HANDSHAKE = 2 * LARGEST_HANDSHAKE_MESSAGE
"""Bytes that a peer sends until its handshake is complete, at most."""

FAILED = "a connection ended in the handshake: the peer has another key or none, is another program, or left"
"""The counted reason of a connection that ended before it sent a message."""


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

    Only if the descriptor is of a connection from `host`, None for any, to `port` of this host.
    """
    with suppress(OSError), TcpConnection(fd) as tcp:
        if tcp.local_port == port and host in {None, tcp.host} and exceeds(tcp.bytes_received):
            tcp.shutdown()
            return True
    return False
