"""The pauses between attempts to connect or to take a lock, and the time until one of them must succeed.

Retries are timed, because the return of a peer, of the network, or of a lock of another process is no event that can be
awaited.
"""

from __future__ import annotations

import anyio

FIRST_RETRY_S, LAST_RETRY_S = 0.05, 1.0
"""The first pause, and the longest one: each is twice the one before."""


class RetryPace:
    """The pace of attempts, from now or from the last `restart`."""

    def __init__(self, timeout_s: float) -> None:
        """Begin the time that the attempts may take."""
        self._timeout_s = timeout_s
        self.restart()

    def restart(self) -> None:
        """Begin again: there was a connection until now."""
        self._pause_s, self._deadline = FIRST_RETRY_S, anyio.current_time() + self._timeout_s

    @property
    def expired(self) -> bool:
        """Return whether the time is over."""
        return anyio.current_time() >= self._deadline

    async def wait(self) -> None:
        """Wait for the time of the next attempt."""
        await anyio.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, LAST_RETRY_S)
