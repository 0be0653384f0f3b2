"""Find ports for servers that are started with one, by tests or by a program."""

from __future__ import annotations

import socket

__all__ = ["free_port"]


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now; it is not reserved."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
