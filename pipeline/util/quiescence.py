"""Wait until the other tasks of the event loop wait too, so that an order of events does not depend on a clock."""

from __future__ import annotations

import asyncio

from anyio.lowlevel import checkpoint

MOST_ROUNDS = 32
"""Bound on the rounds of the event loop, for tasks that never block. A task whose result is set acts in the third."""


async def others_blocked() -> None:
    """Return when no other task can run without an event from outside the loop, or after `MOST_ROUNDS`.

    asyncio has no public name for this; a loop that lacks its queue takes all rounds.
    """
    ready = getattr(asyncio.get_running_loop(), "_ready", None)
    for _ in range(MOST_ROUNDS):
        await checkpoint()
        if ready is not None and not ready:
            return
