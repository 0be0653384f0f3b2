"""Context managers that block, entered and left without blocking the event loop."""

from __future__ import annotations

from contextlib import AbstractContextManager, AsyncExitStack
from typing import TypeVar

import anyio
import anyio.to_thread

__all__ = ["enter_in_thread"]

R = TypeVar("R")


async def enter_in_thread(stack: AsyncExitStack, context: AbstractContextManager[R]) -> R:
    """Enter `context` in a worker thread, and leave it likewise with `stack`.

    Both are shielded: a cancellation neither leaves it entered without an owner, nor half left.
    """

    async def leave() -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(context.__exit__, None, None, None)

    entered: list[R] = []
    with anyio.CancelScope(shield=True):
        entered.append(await anyio.to_thread.run_sync(context.__enter__))
    stack.push_async_callback(leave)
    return entered[0]
