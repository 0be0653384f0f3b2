"""Bound the restarts of a worker: a number of times within any hour, so that a long run survives rare deaths."""

from __future__ import annotations

from collections import deque

RESTART_WINDOW_S = 3600.0
"""Seconds that restarts are counted over. A worker that dies more often has a cause that lasts."""


class RestartBudget:
    """The restarts of one worker."""

    def __init__(self, restarts: int) -> None:
        self._restarts = restarts
        self._taken: deque[float] = deque()
        """The times of the restarts within the last hour."""

    def left(self, now: float) -> int:
        """Return the number of restarts that are left at `now`, in seconds of a monotonic clock."""
        while self._taken and self._taken[0] <= now - RESTART_WINDOW_S:
            self._taken.popleft()
        return self._restarts - len(self._taken)

    def take(self, now: float) -> bool:
        """Take one restart at `now`; return whether one was left."""
        if not self.left(now):
            return False
        self._taken.append(now)
        return True
