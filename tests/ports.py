"""Find ports for servers that are started with one, by tests or by a program."""

from __future__ import annotations

import socket
from contextlib import ExitStack, suppress

__all__ = ["free_port", "two_free_ports"]


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now; it is not reserved."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def two_free_ports() -> int:
    """Return a port of 127.0.0.1 that is free now, as the one behind it is; they are not reserved."""
    while True:
        with ExitStack() as stack, suppress(OSError):
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            port = int(listener.getsockname()[1])
            stack.enter_context(socket.create_server(("127.0.0.1", port + 1)))
            return port
