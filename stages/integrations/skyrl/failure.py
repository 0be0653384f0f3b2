"""`GenerationFailure`: an error of the generation, raised by the loop of a fully asynchronous trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Never, TypeVar

T = TypeVar("T")


class GenerationFailure:
    """Carries the first error of `generate` to the trainer's loop, on the same event loop.

    SkyRL's fully asynchronous trainer ends its process at an exception in one of its tasks that generate.
    """

    def __init__(self) -> None:
        self._error: Exception | None = None
        self._is_set = asyncio.Event()

    async def hand_over(self, error: Exception) -> Never:
        """Have the trainer's loop raise `error`; wait until that cancels this."""
        self._error = self._error or error
        self._is_set.set()
        await asyncio.get_running_loop().create_future()
        raise error

    async def unless_failed(self, collecting: Coroutine[Any, Any, T]) -> T:
        """Return the result of `collecting`, or raise the error if that comes first.

        Groups that arrived before the error are still collected: a flow may end with its last one.
        """
        task, failed = asyncio.ensure_future(collecting), asyncio.ensure_future(self._is_set.wait())
        try:
            await asyncio.wait({task, failed}, return_when=asyncio.FIRST_COMPLETED)
            if self._error is None or task.done():
                return task.result()
            raise self._error
        finally:
            task.cancel()
            failed.cancel()
            await asyncio.gather(task, failed, return_exceptions=True)
