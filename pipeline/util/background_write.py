"""`BackgroundWrite`: one write at a time in a worker thread, while its caller goes on.

A failure is raised once: by the call that asks first. Knows no files.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Self

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from .waiting import Waiters


class BackgroundWrite:
    """Runs a blocking write beside the body of `async with`. Call `finished` before `begin`, and before the end."""

    def __init__(self) -> None:
        self._running = False
        self._failure: Exception | None = None
        """The reason why the last write failed, until it is raised."""
        self._changed = Waiters()
        """Wakes the tasks that wait for the end of a write."""
        self._stack = AsyncExitStack()
        self._tasks: TaskGroup
        """Runs the write; opened by `__aenter__`."""

    async def __aenter__(self) -> Self:
        """Allow writes."""
        self._tasks = await self._stack.enter_async_context(anyio.create_task_group())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Wait for the write that runs, also if the body was cancelled."""
        await self._stack.aclose()

    def begin(self, write: Callable[[], None]) -> None:
        """Run `write` in a worker thread, to its end even if the body is cancelled."""
        self._running = True
        self._tasks.start_soon(self._run, write)

    async def finished(self) -> None:
        """Wait until no write runs.

        Raises:
            Exception: the last one failed, and that was not raised before.
        """
        while self._running:
            await self._changed.wait()
        self._raise_failure()

    async def watch(self) -> None:
        """Wait until a write fails, and raise the reason.

        Raises:
            Exception: a write failed, and that was not raised before.
        """
        while True:
            self._raise_failure()
            await self._changed.wait()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    async def _run(self, write: Callable[[], None]) -> None:
        try:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(write)
        except Exception as error:  # noqa: BLE001 (`finished` or `watch` raises it)
            self._failure = error
        finally:
            self._running = False
            self._changed.wake_all()
