"""The clock of an event loop, which a test sets forward: a timeout of minutes runs out at once, and none by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import anyio

__all__ = ["LoopClock"]


class LoopClock:
    """The clock of the running event loop. Every timer of the loop, anyio's included, goes by it."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._ahead_s = 0.0
        true_time = loop.time
        setattr(loop, "time", lambda: true_time() + self._ahead_s)  # noqa: B010 (a method, to type checkers)

    def set_forward(self, seconds: float) -> None:
        """Have all timers run out that would in `seconds`."""
        self._ahead_s += seconds

    async def set_forward_until(self, holds: Callable[[], bool], seconds: float) -> None:
        """Set the clock forward again and again until `holds`: what starts the timer cannot be waited for."""
        while not holds():
            self.set_forward(seconds)
            await anyio.sleep(0.01)
