"""Flushing: stages that gather send on what they hold, for nothing more comes for now, and senders wait to hear of it.

A source requests it; a stage that holds records back receives from a `FlushableInbox`. It is told as soon as nothing is
on its way to it, so stages flush in the order in which records pass. The stream goes on afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import anyio
import anyio.lowlevel

from .channels.memory import CHECKPOINT_EVERY
from .context import current

if TYPE_CHECKING:
    from .channels.channel import ReceiveChannel

__all__ = ["FlushableInbox", "flush_cancels"]

T = TypeVar("T")


class FlushableInbox(Generic[T]):
    """The records of a channel for a stage that holds some back, and None among them where a flush is due.

    At None send on what is held back, and receive again. A flush is due while one is requested, nothing is on its way
    to the stage that runs, and `holding` returns true: there is something to send on.

    Args:
        inbox: where the records come from.
        holding: return whether the stage holds anything back.
    """

    __slots__ = ("_holding", "_inbox", "_until_checkpoint")

    def __init__(self, inbox: ReceiveChannel[T], holding: Callable[[], bool]) -> None:
        self._inbox = inbox
        self._holding = holding
        self._until_checkpoint = CHECKPOINT_EVERY

    def __repr__(self) -> str:
        return f"<FlushableInbox of {self._inbox!r}>"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T | None:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    async def receive(self) -> T | None:
        """Return the next record, waiting for one if need be; None where a flush is due.

        Raises:
            anyio.EndOfStream: as `ReceiveChannel.receive`, whose other errors this raises too.
        """
        self._until_checkpoint -= 1
        if self._until_checkpoint <= 0:
            self._until_checkpoint = CHECKPOINT_EVERY
            await anyio.lowlevel.checkpoint()
        try:
            return self._inbox.receive_nowait()  # a cancel scope for each record would cost more than to receive it
        except anyio.WouldBlock:
            pass
        self._until_checkpoint = CHECKPOINT_EVERY
        with anyio.CancelScope() as scope, flush_cancels(scope, self._holding):
            return await self._inbox.receive()
        return None


def flush_cancels(scope: anyio.CancelScope, holding: Callable[[], bool]) -> AbstractContextManager[None]:
    """Within the body, have `scope` cancelled when a flush is due for the stage that runs; see `FlushableInbox`."""
    context = current()

    def look() -> None:
        if holding() and context.nothing_on_the_way():
            scope.cancel()

    return context.flush.watched(look)
