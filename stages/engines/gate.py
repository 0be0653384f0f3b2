"""A gate that work passes one piece at a time, and that can be shut for several reasons at once.

It is open when no reason is left. Shutting it waits for the work that is inside. Knows nothing about what the work is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

from ...pipeline.waiting import Waiters

__all__ = ["Gate", "Reason"]

Reason: TypeAlias = Literal["paused", "asleep", "updating", "weightless"]
"""Why nothing may be sampled now."""


class Gate:
    """Lets work in while nothing keeps it shut. One event loop uses it."""

    def __init__(self) -> None:
        self.shut_for: set[Reason] = set()
        """Why nobody is let in; empty while the gate is open."""
        self._shutting: Counter[Reason] = Counter()
        """How many wait, for each reason, until everybody has left."""
        self._relied_on: set[Reason] = set()
        """Reasons that somebody who shut the gate counts on: it is open again by `open` alone."""
        self._inside = 0
        self._news = Waiters()
        """Wakes those who wait for the gate to open, or for the last to leave."""

    async def opened(self) -> None:
        """Wait until the gate is open. It may be shut again before the caller goes `inside`, unless that is at once."""
        while self.shut_for:
            await self._news.wait()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Work within the body; whoever shuts the gate waits for it."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            self._news.wake_all()

    async def shut(self, reason: Reason) -> None:
        """Let nobody in for `reason`, and wait until everybody has left. Where all who do so give up, it is open."""
        self.shut_for.add(reason)
        self._shutting[reason] += 1
        try:
            while self._inside:
                await self._news.wait()
            if reason in self.shut_for:
                self._relied_on.add(reason)
        finally:
            self._shutting[reason] -= 1
            if not self._shutting[reason] and reason not in self._relied_on:
                self.open(reason)

    def open(self, reason: Reason) -> None:
        """`reason` is over."""
        self.shut_for.discard(reason)
        self._relied_on.discard(reason)
        self._news.wake_all()
