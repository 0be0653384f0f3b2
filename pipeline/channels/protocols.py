"""What every end of a channel does alike, whatever carries it: it is left by closing, and iterated until the end."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Protocol, Self, TypeVar

import anyio

__all__ = ["AsyncCloseable", "AsyncReceiver"]

T_co = TypeVar("T_co", covariant=True)


class AsyncCloseable(Protocol):
    """Leaving `async with` closes."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close. AsyncCloseable twice is fine."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncReceiver(AsyncCloseable, Protocol[T_co]):
    """Iterating receives until the stream ends."""

    @abstractmethod
    async def receive(self) -> T_co:
        """The next record."""

    def __aiter__(self) -> AsyncIterator[T_co]:
        return self

    async def __anext__(self) -> T_co:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None
