"""Bytes that arrived on TCP connections and wait for the event loop: a peer that has too many is cut off.

ZeroMQ would stop reading from it at a high-water mark (`ZMQ_RCVHWM`), but aborts the process if such a peer disconnects
while it is stopped, and a heartbeat of either side is due or among what it had sent (libzmq 4.3.5: `!_io_error`). So no
socket with connections has one. ZeroMQ reads all, and this counts: the kernel knows what arrived, the receiver what it
handled. Knows neither keys nor messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..util.watch_thread import WatchThread
from .heartbeat import PING_S

FRAMING_BYTES = 35
"""Bytes that ZeroMQ adds to a short frame, with its encryption; 7 more to one that is longer than 222 bytes."""

PING_BYTES = 64
"""More than a heartbeat has; heartbeats are never handled here."""

MOST_BESIDE = 1024
"""Bytes of a record beside those that its descriptor counts: descriptor, and framing."""

WATCH_S = 0.5
"""The interval of checks while the event loop is blocked."""


class Inflow:
    """The bytes of one connection: those that arrived, against those of the messages that were handled."""

    __slots__ = ("_since", "handled")

    def __init__(self) -> None:
        self.handled: int = 0
        """Bytes of the messages that were handled. Advanced by the event loop."""
        self._since = (0, 0, time.monotonic())
        """The bytes that had arrived and those handled when last all were handled, and the time of that."""

    def begin(self, received: int) -> None:
        """Count from now on, when `received` bytes have arrived."""
        self._since = (received, self.handled, time.monotonic())

    def settle(self, received: int) -> None:
        """Record that all messages were handled, when `received` bytes have arrived.

        If no message has been handled since the last time, these bytes are of one that has not ended.
        """
        if self.handled != self._since[1]:
            self.begin(received)

    def unread(self, received: int) -> int:
        """Return how many of the `received` bytes that ever arrived were not handled. Safe from any thread."""
        received_before, handled_before, since_s = self._since
        pings = 1 + int((time.monotonic() - since_s) / PING_S)
        return received - received_before - (self.handled - handled_before) - PING_BYTES * pings


class BlockedLoopWatch:
    """Calls `sweep` in a thread, again and again, while the event loop that should call `beat` is blocked."""

    def __init__(self, late_s: float, sweep: Callable[[], None]) -> None:
        """Prepare; `late_s` is the time without `beat` that counts as a blocked loop."""
        self._late_s = late_s
        self._sweep = sweep
        self._beat_s = time.monotonic()
        self._thread = WatchThread("penstock unread watch", WATCH_S, self._check)

    def start(self) -> None:
        """Start the thread. Blocks until it runs."""
        self._thread.start()

    def beat(self) -> None:
        """Record that the event loop runs."""
        self._beat_s = time.monotonic()

    def _check(self) -> None:
        if time.monotonic() - self._beat_s > self._late_s:
            self._sweep()

    def close(self) -> None:
        """End the thread. Closing twice is fine."""
        self._thread.close()
