"""Flush: stages that hold records back send them on, because no more will come for now and senders wait for their end.

A source requests it; a stage that holds records back receives from a `FlushableInbox`, which returns None as soon as
no trajectory is on its way to the stage. So stages flush in the order of the stream. The stream goes on afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import anyio
import anyio.lowlevel

from ..channels.memory import CHECKPOINT_EVERY
from .context import current

if TYPE_CHECKING:
    from ..channels.channel import ReceiveChannel

T = TypeVar("T")


class FlushableInbox(Generic[T]):
    """The receiving end of a stage that holds records back: returns None where a flush is due.

    At None, send the records that are held back, and receive again. A flush is due while one is requested, no
    trajectory is on its way to the running stage, and `holding` returns true.

    Args:
        inbox: the channel to receive from.
        holding: returns whether the stage holds any records back.
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


@contextmanager
def flush_cancels(scope: anyio.CancelScope, holding: Callable[[], bool]) -> Iterator[None]:
    """Cancel `scope` when a flush is due for the running stage within the body; see `FlushableInbox`."""
    context = current()

    def check() -> None:
        if holding() and context.nothing_on_the_way():
            scope.cancel()

    context.holding.append(holding)
    try:
        with context.flush.checked_by(check):
            yield
    finally:
        context.holding.remove(holding)
