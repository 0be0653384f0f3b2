"""Cancel a wait for one event when another one happens first."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio


@asynccontextmanager
async def cancelled_after(happened: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Cancel the body, without an error, when `happened` returns before its end."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_cancel_after, happened, tasks.cancel_scope)
        yield
        tasks.cancel_scope.cancel()


async def _cancel_after(happened: Callable[[], Awaitable[object]], scope: anyio.CancelScope) -> None:
    await happened()
    scope.cancel()
