"""Heartbeats detect an unresponsive peer: a stopped process, or one on a host that hangs; its streams stay open.

ZeroMQ's own threads send and answer them without the interpreter, so a busy process, however long, stays responsive.
Life is a message that ZeroMQ has decoded, or the answer to a heartbeat. Bytes that arrive are not: a length that was
changed on the way turns all that follows into one message without end.

Over ipc both ends send heartbeats, and a monitor reports that a connection was closed for want of an answer, without
naming it. Over TCP only the side that connects sends them: its answers come through both directions of the connection,
and heartbeats of the other side would hide that this direction is damaged. Knows sockets, not peers.
"""

from __future__ import annotations

import zmq

DEFAULT_HEARTBEAT_TIMEOUT_S = 30.0
"""Bound on the time that a peer may be unresponsive: longer than a machine that swaps, or a debugger that inspects a
process, takes."""

PING_S = 1.5
"""The longest time between two heartbeats over TCP: a receiver may have a shorter timeout than its senders."""

PINGS_PER_TIMEOUT = 3
"""Heartbeats within the time that a peer may be unresponsive."""

GRACE_S = 0.1
"""Time that the control connection has to report a death before the end of a ZeroMQ connection is taken for an
unresponsive peer: it takes 1 ms.
"""

CHECKS_PER_TIMEOUT = 6
"""Checks of a TCP connection within the time that its other side may be unresponsive."""

UNRESPONSIVE = "did not respond for {} s, because its process was stopped or its host hung"
"""The predicate of an error about an unresponsive peer."""

DAMAGED = "sent bytes that cannot be decoded: they were changed on their way, or end in the middle of a message"
"""The predicate of an error about a peer whose connection ZeroMQ closed here, for want of a message."""


def enable_heartbeats(socket: zmq.Socket[bytes], heartbeat_timeout_s: float | None) -> None:
    """Close connections of `socket`, unused so far, if the other side is unresponsive for `heartbeat_timeout_s`.

    A heartbeat is sent every third of that time, two messages that wake a thread on each side; the rest is for the
    answer.
    """
    if heartbeat_timeout_s is not None:
        third_ms = max(1, int(1000 * heartbeat_timeout_s / PINGS_PER_TIMEOUT))
        socket.setsockopt(zmq.HANDSHAKE_IVL, 3 * third_ms)
        socket.setsockopt(zmq.HEARTBEAT_IVL, third_ms)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2 * third_ms)


def ping_interval_s(heartbeat_timeout_s: float | None) -> float:
    """Return the seconds between two heartbeats of the side that connects over TCP."""
    return PING_S if heartbeat_timeout_s is None else min(PING_S, heartbeat_timeout_s / PINGS_PER_TIMEOUT)


def timeout_with(ping_s: float, heartbeat_timeout_s: float | None) -> float | None:
    """Return the seconds without a byte after which a peer that sends a heartbeat every `ping_s` is unresponsive."""
    return None if heartbeat_timeout_s is None else max(heartbeat_timeout_s, PINGS_PER_TIMEOUT * ping_s)


def ping(socket: zmq.Socket[bytes], heartbeat_timeout_s: float | None) -> None:
    """Send heartbeats on the TCP connection that `socket` will begin.

    ZeroMQ closes the connection if it has decoded no message for `heartbeat_timeout_s` from a heartbeat on.
    """
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(1000 * ping_interval_s(heartbeat_timeout_s))))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * (heartbeat_timeout_s or 0)))
