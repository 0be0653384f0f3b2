"""`shielded`: what has to be awaited although its caller failed or was cancelled, and must not hold up a Ctrl-C.

Knows nothing about what the work is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

__all__ = ["shielded"]


async def shielded(
    work: Callable[[], Awaitable[None]],
    what: str,
    *,
    after: BaseException | None,
    within_s: float,
    hurried_s: float,
) -> None:
    """Await `work()` to its end, though anyio cancels the caller, and then let the caller be cancelled.

    asyncio's own `Task.cancel` is one call and no state: one that came before does no harm, one that comes meanwhile
    ends the work.

    Args:
        work: what is to be done.
        what: the same in words, for messages: "a server to wake up".
        after: what ended that which `work` cleans up after, if it did not end well; whatever is no `Exception` is a
            cancellation.
        within_s: how long `work` may take.
        hurried_s: how long it may still take once the caller is cancelled, be it before or meanwhile.

    Raises:
        TimeoutError: `work` took longer, and was cancelled.
        Exception: whatever `work` raised.
    """
    hurried = after is not None and not isinstance(after, Exception)
    scope = anyio.CancelScope(shield=True, deadline=anyio.current_time() + (hurried_s if hurried else within_s))
    failure: Exception | None = None
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_hurry, scope, hurried_s)
            with scope:
                failure = await _failure_of(work)
            tasks.cancel_scope.cancel()
    finally:
        if scope.cancelled_caught:
            failure = TimeoutError(f"expected {what} within {within_s:g} s, {hurried_s:g} s once cancelled; got no end")
        if failure is not None:
            raise failure


async def _failure_of(work: Callable[[], Awaitable[None]]) -> Exception | None:
    """What `work` raised: a task group would wrap it."""
    try:
        await work()
    except Exception as error:  # noqa: BLE001 (raised by the caller)
        return error
    return None


async def _hurry(scope: anyio.CancelScope, within_s: float) -> None:
    """Once the caller is cancelled, leave `scope` no more than `within_s`: this task, unlike the work, hears of it."""
    try:
        await anyio.sleep_forever()
    finally:
        scope.deadline = min(scope.deadline, anyio.current_time() + within_s)
