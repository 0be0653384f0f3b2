"""The events of a ZeroMQ socket's connections, delivered to the event loop in their order.

Knows sockets and file descriptors, not peers.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count

import zmq

from .transport import EVENTS, POLLIN

MOST_EVENTS = 100_000
"""Events that may wait for a blocked loop: some 20 MB. ZeroMQ's thread waits for the loop when there are more, and no
event is lost."""

_EVENT = struct.Struct("=Hi")

ENDS_AND_BEGINNINGS = int(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
"""The events that a port watches. Not the failures of handshakes: libzmq 4.3.5 reports a message that it cannot decrypt
as one. Where that is watched, it takes an error code of its report for that of the message, and keeps the connection,
from which it reads no more."""

_numbers = count()


class SocketMonitor:
    """Calls `on_event` with each event of `events` and its value, from now until closed."""

    def __init__(self, socket: zmq.Socket[bytes], events: int, on_event: Callable[[int, int], None]) -> None:
        self._socket = socket
        self._on_event = on_event
        self._fetched: deque[tuple[int, int]] = deque()
        """Events that were not delivered yet."""
        self._lock = threading.Lock()
        """Held while the socket is used: any thread may call `fetch`."""
        self._loop = asyncio.get_running_loop()
        endpoint = f"inproc://penstock-monitor-{next(_numbers)}"
        socket.monitor(endpoint, events)
        self._monitor = socket.context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, MOST_EVENTS)
        self._monitor.setsockopt(zmq.LINGER, 0)
        self._monitor.connect(endpoint)
        self._fd = int(self._monitor.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self.read)
        self.read()  # the descriptor reports only events after a read

    def read(self) -> None:
        """Deliver all events that have happened."""
        self._fetch()
        while self._fetched and not self._monitor.closed:
            self._on_event(*self._fetched.popleft())
            if not self._fetched:
                self._fetch()

    def undelivered(self) -> list[tuple[int, int]]:
        """Return the events that a blocked event loop has not handled. Safe from any thread."""
        self._fetch()
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.read)  # the descriptor reports only events after the last use
        return list(self._fetched)

    def _fetch(self) -> None:
        with self._lock:
            while not self._monitor.closed and int(self._monitor.getsockopt(EVENTS)) & POLLIN:
                self._fetched.append(_EVENT.unpack(self._monitor.recv_multipart(zmq.NOBLOCK)[0]))

    def close(self) -> None:
        """Stop delivering events. Closing twice is fine."""
        if self._monitor.closed:
            return
        self._loop.remove_reader(self._fd)
        if not self._socket.closed:
            self._socket.disable_monitor()
        with self._lock:
            self._monitor.close(linger=0)
