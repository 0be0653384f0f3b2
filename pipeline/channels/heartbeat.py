"""Heartbeats, which detect an unresponsive peer: a stopped process, or one on a host that hangs; its streams stay open.

ZeroMQ's own threads send and answer them without the interpreter, so a busy process, however long, stays responsive.
Over ipc they close the connection of a peer that does not answer, and a monitor reports that, though not which
connection it was. Over TCP they only send, and the kernel reports when something was last received. Knows sockets, not
peers.
"""

from __future__ import annotations

import zmq

DEFAULT_HEARTBEAT_TIMEOUT_S = 30.0
"""Bound on the time in which a peer is unresponsive: longer than a machine that swaps, or a debugger that inspects a
process, takes."""

GRACE_S = 0.1
"""Time that the control connection has to report a death before the end of a ZeroMQ connection is taken for an
unresponsive peer: it takes 1 ms.
"""

CHECKS_PER_TIMEOUT = 6
"""Checks of a TCP connection within the time that its other side may be unresponsive."""

UNRESPONSIVE = "did not respond for {} s, because its process was stopped or its host hung"
"""The predicate of an error about an unresponsive peer."""


def enable_heartbeats(socket: zmq.Socket[bytes], heartbeat_timeout_s: float | None) -> None:
    """Close connections of `socket`, which has none yet, if the other side is unresponsive for `heartbeat_timeout_s`.

    A heartbeat is sent every third of that time, two messages that wake a thread on each side; the rest is for the
    answer.
    """
    if heartbeat_timeout_s is not None:
        third_ms = max(1, int(1000 * heartbeat_timeout_s / 3))
        socket.setsockopt(zmq.HANDSHAKE_IVL, 3 * third_ms)
        socket.setsockopt(zmq.HEARTBEAT_IVL, third_ms)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2 * third_ms)


def send_heartbeats(socket: zmq.Socket[bytes], heartbeat_timeout_s: float | None) -> None:
    """Send heartbeats on connections of `socket`, which has none yet, and close none of them.

    Over TCP the kernel knows when something was last received (`tcp_connection`), and a peer is notified before it is
    disconnected.
    """
    if heartbeat_timeout_s is not None:
        socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(1000 * heartbeat_timeout_s / 3)))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 0)
