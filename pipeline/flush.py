"""Flushing: stages that gather send on what they hold, for nothing more comes for now, and senders wait to hear of it.

A source requests it; a stage that holds records back receives with `receive_unless_flushed`. It is told as soon as
nothing is on its way to it, so stages flush in the order in which records pass. The stream goes on afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import anyio

from .context import current

if TYPE_CHECKING:
    from .channels.channel import ReceiveChannel

__all__ = ["flush_cancels", "receive_unless_flushed"]

T = TypeVar("T")


async def receive_unless_flushed(inbox: ReceiveChannel[T], holding: Callable[[], bool]) -> T | None:
    """Return the next record; None where a flush is due: send on what is held back, and receive again.

    A flush is due while one is requested, nothing is on its way to the stage that calls this, and `holding` says that
    there is something to send on.

    Raises:
        anyio.EndOfStream: as `receive`, whose other errors this raises too.
    """
    try:
        return inbox.receive_nowait()
    except anyio.WouldBlock:
        pass
    with anyio.CancelScope() as scope, flush_cancels(scope, holding):
        return await inbox.receive()
    return None


@contextmanager
def flush_cancels(scope: anyio.CancelScope, holding: Callable[[], bool]) -> Iterator[None]:
    """Have `scope` cancelled when a flush is due for the stage that runs; see `receive_unless_flushed`."""
    context = current()

    def look() -> None:
        if holding() and context.nothing_on_the_way():
            scope.cancel()

    with context.flush.watched(look):
        yield
