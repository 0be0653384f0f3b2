"""Find ports for servers that are started with one, by tests or by a program."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress

__all__ = ["free_port", "two_free_ports"]

PORTS = range(10_000, 32_000)
"""Below those that the kernel gives to connections, which may take one before its server begins."""


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now; it is not reserved."""
    return _free(1)


def two_free_ports() -> int:
    """Return a port of 127.0.0.1 that is free now, as the one behind it is; they are not reserved."""
    return _free(2)


def _free(count: int) -> int:
    while True:
        first = random.SystemRandom().choice(PORTS)
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
