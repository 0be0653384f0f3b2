"""The common base of all ends: `async with` closes them, and iterating receives until the stream ends."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Protocol, Self, TypeVar

import anyio

T_co = TypeVar("T_co", covariant=True)


class AsyncCloseable(Protocol):
    """An end that `async with` closes."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close. Closing twice is fine."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncReceiver(AsyncCloseable, Protocol[T_co]):
    """An end that can be iterated until the stream ends."""

    @abstractmethod
    async def receive(self) -> T_co:
        """Return the next record."""

    def __aiter__(self) -> AsyncIterator[T_co]:
        return self

    async def __anext__(self) -> T_co:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None
