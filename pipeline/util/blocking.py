"""Make blocking calls, and enter and leave blocking context managers, without blocking the event loop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, AsyncExitStack
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from .user_code import call_user

R = TypeVar("R")


async def in_thread(call: Callable[..., R], *arguments: Any) -> R:
    """Return the result of a call in a worker thread; the call goes on if the wait is cancelled."""
    return await anyio.to_thread.run_sync(call, *arguments, abandon_on_cancel=True)


async def enter_in_thread(stack: AsyncExitStack, context: AbstractContextManager[R]) -> R:
    """Enter `context` in a worker thread, and leave it in one when `stack` is closed.

    Both are shielded: after a cancellation the context is either not entered or owned by `stack`.
    """

    async def leave() -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(call_user, context.__exit__, None, None, None)

    entered: list[R] = []
    with anyio.CancelScope(shield=True):
        entered.append(await anyio.to_thread.run_sync(call_user, context.__enter__))
    stack.push_async_callback(leave)
    return entered[0]
