"""Where a stage listens, for whoever has to know before it can begin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .....pipeline.waiting import Waiters

__all__ = ["Listening"]


class Listening:
    """The URL of a stage, while it has one. One event loop uses it."""

    def __init__(self) -> None:
        self._url: str | None = None
        self._waiting = Waiters()

    def __repr__(self) -> str:
        return f"<Listening at {self._url}>" if self._url else "<Listening nowhere>"

    async def url(self) -> str:
        """Where it listens, as soon as it does."""
        while self._url is None:
            await self._waiting.wait()
        return self._url

    @contextmanager
    def at(self, url: str) -> Iterator[None]:
        """It listens at `url` within the body."""
        self._url = url
        self._waiting.wake_all()
        try:
            yield
        finally:
            self._url = None
