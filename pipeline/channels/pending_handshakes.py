"""The connections to an acceptor that have not completed the handshake: their deadlines, and their number.

Shared by all acceptors: of channels over shm and tcp, and of published weights. Knows neither sockets nor messages.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

HANDSHAKE_S = 10.0
"""A connection must complete the handshake within this time."""

MAX_HANDSHAKES = 64
"""Handshakes in progress at a time, beside those of as many peers as may join: each holds a file descriptor."""

SETTLED_S = 1.0
"""The age of a connection that may be closed because there are too many, at least: an honest handshake takes
milliseconds, unless a port is busy with many of them."""

CROWD = 4
"""Times as many connections as may be in handshake that close younger ones too: each holds a file descriptor."""


class Pending(Protocol):
    """A connection that has not completed the handshake."""

    host: str
    """The other side's address."""

    @property
    def holds_place(self) -> bool:
        """Return whether a place is granted on it: it is not among the connections that are too many."""
        ...

    @property
    def unserved(self) -> bool:
        """Return whether bytes of it wait to be read here: then its delay is no fault of its peer."""
        ...


P = TypeVar("P", bound=Pending)


class PendingHandshakes(Generic[P]):
    """The deadline of each handshake, and the limit on their number, for an acceptor with `places`.

    A handshake ends by `end`, with a reason; `read` is called before, and may complete some by the bytes that came.
    """

    def __init__(self, places: int, read: Callable[[], object], end: Callable[[P, str], None]) -> None:
        self._most = places + MAX_HANDSHAKES
        self._read = read
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._deadlines: dict[P, asyncio.TimerHandle] = {}
        """Of each connection, the oldest first."""
        self._next_limit: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._deadlines)

    def add(self, connection: P) -> None:
        """Give a new connection `HANDSHAKE_S` to complete the handshake."""
        self._set_deadline(connection)
        if len(self) > self._most:
            self._limit_after(0)

    def remove(self, connection: P) -> None:
        """Let a connection be: it has completed the handshake, or has ended, or is about to be closed."""
        if (deadline := self._deadlines.pop(connection, None)) is not None:
            deadline.cancel()

    def close(self) -> None:
        """End no more connections."""
        for timer in [*self._deadlines.values(), self._next_limit]:
            if timer is not None:
                timer.cancel()

    def _set_deadline(self, connection: P) -> None:
        self._deadlines[connection] = self._loop.call_later(HANDSHAKE_S, self._expired, connection)

    def _expired(self, connection: P) -> None:
        late = self._loop.time() - self._deadlines[connection].when() > SETTLED_S
        self._read()
        if connection in self._deadlines and (late or connection.unserved):
            self._set_deadline(connection)  # the time in which this process did not get to it is not its peer's
        elif connection in self._deadlines:
            self._end_for(connection, f"a connection from {connection.host} did not join within {HANDSHAKE_S} s")

    def _limit_after(self, delay_s: float) -> None:
        due_s = self._loop.time() + delay_s
        if self._next_limit is None or self._next_limit.when() > due_s:
            if self._next_limit is not None:
                self._next_limit.cancel()
            self._next_limit = self._loop.call_at(due_s, self._limit)

    def _limit(self) -> None:
        """End the oldest of the address with the most where too many wait: an honest one is hardly ever the oldest.

        One that has only begun, or that was not served yet, is left until there are `CROWD` times as many.
        """
        self._next_limit = None
        self._read()
        by_host: defaultdict[str, deque[P]] = defaultdict(deque)
        for connection in self._deadlines:
            if not connection.holds_place:
                by_host[connection.host].append(connection)
        count, settled_due_s = sum(map(len, by_host.values())), self._loop.time() + HANDSHAKE_S - SETTLED_S
        while count > self._most and (largest := max(by_host.values(), key=len)):
            connection = largest.popleft()
            settled = self._deadlines[connection].when() < settled_due_s
            if count > CROWD * self._most or (settled and not connection.unserved):
                self._end_for(connection, f"too many connections from {connection.host} do not join")
                count -= 1
        if count > self._most:
            self._limit_after(SETTLED_S)

    def _end_for(self, connection: P, reason: str) -> None:
        self.remove(connection)
        self._end(connection, reason)
