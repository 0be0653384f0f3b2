"""`shielded`: await cleanup although the caller failed or was cancelled, without delaying a Ctrl-C for long."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from ..util.exception_groups import unwrap_single


async def shielded(
    work: Callable[[], Awaitable[None]],
    what: str,
    *,
    after: BaseException | None,
    timeout_s: float,
    cancel_timeout_s: float,
) -> None:
    """Await `work()` to its end although anyio cancels the caller, and then cancel the caller.

    asyncio's own `Task.cancel` is a single call without state: one before this call has no effect on the work, one
    during it ends the work.

    Args:
        work: the cleanup.
        what: a description for messages: "a server to wake up".
        after: the exception that `work` cleans up after, or None; one that is not an `Exception` is a cancellation.
        timeout_s: the time for `work`.
        cancel_timeout_s: the remaining time once the caller is cancelled, before this call or during it.

    Raises:
        TimeoutError: `work` took longer, and was cancelled.
        Exception: an exception of `work`.
    """
    cancelled = after is not None and not isinstance(after, Exception)
    scope = anyio.CancelScope(
        shield=True, deadline=anyio.current_time() + (cancel_timeout_s if cancelled else timeout_s)
    )
    try:
        with unwrap_single():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(limit_once_cancelled, scope, cancel_timeout_s)
                with scope:
                    await work()
                tasks.cancel_scope.cancel()
    finally:
        if scope.cancelled_caught:
            raise TimeoutError(
                f"expected {what} within {timeout_s:g} s, {cancel_timeout_s:g} s once cancelled; got no end"
            )


async def limit_once_cancelled(scope: anyio.CancelScope, timeout_s: float) -> None:
    """Limit `scope` to `timeout_s` once the caller is cancelled: this task, unlike the work, is not shielded."""
    try:
        await anyio.sleep_forever()
    finally:
        scope.deadline = min(scope.deadline, anyio.current_time() + timeout_s)
