"""GenerationGate: admits generation, and can be closed for several reasons at once.

It is open when no reason is left. Closing it waits for the work inside to end, of whatever kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

from ..._pipeline.util.waiting import Waiters

Reason: TypeAlias = Literal["paused", "asleep", "updating", "no_weights"]
"""A reason to stop sampling."""


class GenerationGate:
    """Admits work while it is open. One event loop uses it."""

    def __init__(self) -> None:
        self.closed_for: set[Reason] = set()
        """Reasons that keep the gate closed; empty while it is open."""
        self._closing: Counter[Reason] = Counter()
        """Calls of `close` that wait, by reason, for the work inside to end."""
        self._completed: set[Reason] = set()
        """Reasons whose call of `close` has returned: only `open` ends them."""
        self._inside = 0
        self._changed = Waiters()
        """Wakes tasks that wait for the gate to open, or for the last work inside to end."""

    async def opened(self) -> None:
        """Wait until the gate is open. It may close again unless the caller enters `inside` without awaiting."""
        while self.closed_for:
            await self._changed.wait()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Count the body as work inside; `close` waits for its end."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            self._changed.wake_all()

    async def close(self, reason: Reason) -> None:
        """Close the gate for `reason`, and wait for the work inside to end.

        The gate reopens if every call for `reason` is cancelled while it waits.
        """
        self.closed_for.add(reason)
        self._closing[reason] += 1
        try:
            while self._inside:
                await self._changed.wait()
            if reason in self.closed_for:
                self._completed.add(reason)
        finally:
            self._closing[reason] -= 1
            if not self._closing[reason] and reason not in self._completed:
                self.open(reason)

    def open(self, reason: Reason) -> None:
        """Remove `reason`."""
        self.closed_for.discard(reason)
        self._completed.discard(reason)
        self._changed.wake_all()
