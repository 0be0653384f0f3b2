"""Receive several records at a time, for stages whose numpy calls cost more than the values that they process.

Only the first record of a chunk is waited for; those that have arrived already come with it. So no record is held back
to fill a chunk, and a stage that keeps up works on one record at a time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Generic, Self, TypeVar

import anyio
import anyio.lowlevel

from .channel import ReceiveChannel, SendChannel

T = TypeVar("T")

MAX_CHUNK = 16
"""Records in a chunk at most: enough to share the cost of a call, few enough not to hold up the event loop."""


def receive_chunks(inbox: ReceiveChannel[T], most: int = MAX_CHUNK) -> AsyncIterator[list[T]]:
    """Iterate over the records of `inbox`, 1 to `most` of them at a time, in order, until the stream ends.

    Raises:
        PeerLost: as `receive` does, once the records before it were returned.
    """
    return _Chunks(inbox, most)


class _Chunks(Generic[T]):
    """The iterator of `receive_chunks`."""

    __slots__ = ("_failure", "_inbox", "_most", "_until_checkpoint")

    def __init__(self, inbox: ReceiveChannel[T], most: int) -> None:
        self._inbox = inbox
        self._most = most
        self._until_checkpoint = most
        """Records that may be received before other tasks must have had their turn."""
        self._failure: Exception | None = None
        """The error that followed the last records: the channel raises it once, and the next call raises it again."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[T]:
        try:
            records = [await self._first()]
        except anyio.EndOfStream:
            raise StopAsyncIteration from None
        try:
            with suppress(anyio.WouldBlock):
                while len(records) < self._most:
                    records.append(self._inbox.receive_nowait())
        except Exception as error:  # noqa: BLE001 (raised by the next call)
            self._failure = error
        self._until_checkpoint -= len(records)
        return records

    async def _first(self) -> T:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if self._until_checkpoint <= 0:
            self._until_checkpoint = self._most
            await anyio.lowlevel.checkpoint()
        return await self._inbox.receive()


async def send_all(outbox: SendChannel[T], records: list[T]) -> None:
    """Send `records` in order, and drop the reference to each as it leaves: it may lie in a producer's slots."""
    records.reverse()
    while records:
        await outbox.send(records.pop())
