"""Who is silent: a process that is stopped, or one on a host that hangs. Its door stays open, so no stream ends.

ZeroMQ's own threads ask the other side for signs of life and answer without the interpreter: who is busy, however long,
is not silent. They cut the connection of who does not answer, and say so on a monitor, though not whose connection it
was. Over TCP they only ask, and the kernel is asked when something came last. Knows sockets, not peers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

from .socket_monitor import SocketMonitor

__all__ = [
    "CHECKS_PER_TIMEOUT",
    "DEFAULT_HEARTBEAT_TIMEOUT_S",
    "GRACE_S",
    "UNRESPONSIVE",
    "DisconnectMonitor",
    "enable_heartbeats",
    "send_heartbeats",
]

DEFAULT_HEARTBEAT_TIMEOUT_S = 30.0
"""How long a peer may be silent: longer than a machine that swaps, or a debugger that looks at a process, takes."""

GRACE_S = 0.1
"""How long the door has to tell of a death before the end of a connection is taken for silence: it takes 1 ms."""

CHECKS_PER_TIMEOUT = 6
"""How often is looked at a TCP connection within the time that its other side may be silent."""

UNRESPONSIVE = "was silent for {} s, for its process was stopped or its host hung"
"""What is said of whoever is given up."""


def enable_heartbeats(socket: zmq.Socket[bytes], heartbeat_timeout_s: float | None) -> None:
    """Have connections of `socket`, which has none yet, cut where the other side is silent for `heartbeat_timeout_s`.

    It is asked every third of that time, two messages that wake a thread on each side, and has the rest to answer.
    """
    if heartbeat_timeout_s is not None:
        third_ms = max(1, int(1000 * heartbeat_timeout_s / 3))
        socket.setsockopt(zmq.HANDSHAKE_IVL, 3 * third_ms)
        socket.setsockopt(zmq.HEARTBEAT_IVL, third_ms)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2 * third_ms)


def send_heartbeats(socket: zmq.Socket[bytes], heartbeat_timeout_s: float | None) -> None:
    """Have connections of `socket`, which has none yet, ask the other side for signs of life, and cut none of them.

    Over TCP the kernel knows when something came last (`tcp_connection`): a peer is told that it is given up.
    """
    if heartbeat_timeout_s is not None:
        socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(1000 * heartbeat_timeout_s / 3)))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 0)


class DisconnectMonitor:
    """Has `look` called a little after connections of a socket have ended, and when a newcomer must have one."""

    def __init__(self, socket: zmq.Socket[bytes], heartbeat_timeout_s: float, look: Callable[[], None]) -> None:
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._look = look
        self._loop = asyncio.get_running_loop()
        self._timers: set[asyncio.TimerHandle] = set()
        self._monitor = SocketMonitor(socket, zmq.EVENT_DISCONNECTED, self._hear)

    def expect(self) -> None:
        """Someone was let in whose connection is not there yet."""
        self._look_in(self._heartbeat_timeout_s)

    def _hear(self, _event: int, _value: int) -> None:
        self._look_in(GRACE_S)

    def _look_in(self, delay_s: float) -> None:
        def look() -> None:
            self._timers.discard(timer)
            self._look()

        timer = self._loop.call_later(delay_s, look)
        self._timers.add(timer)

    def close(self) -> None:
        """Look no more."""
        self._monitor.close()
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
