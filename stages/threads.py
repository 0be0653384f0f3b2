"""A bounded number of threads for code that blocks and may never return: environments, reward functions.

Not `anyio.to_thread`: a call that hangs must not delay the end of the process, and must count against the bound even
when no task waits for it any more. So these threads are daemons, and an abandoned call keeps its thread until it
returns. Knows nothing about the functions.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

from .._pipeline.util.waiting import Waiters

__all__ = ["Call", "Threads"]


class Call:
    """A function call in a thread. Its fields change on the event loop only."""

    __slots__ = ("_function", "_result", "_then", "returned")

    def __init__(self, function: Callable[[], object], loop: asyncio.AbstractEventLoop) -> None:
        self._function = function
        self._result: asyncio.Future[tuple[object, BaseException | None]] = loop.create_future()
        """Cancelled when no task waits any more."""
        self._then: Callable[[], object] | None = None
        self.returned = False
        """Whether the function has returned, or was never called."""

    def __await__(self) -> Any:
        """Wait for the result of the function; raise its exception."""
        value, error = yield from self._result.__await__()
        if error is not None:
            raise error
        return value

    def then(self, afterwards: Callable[[], object]) -> None:
        """Call `afterwards` on the event loop once the function has returned."""
        if self.returned:
            afterwards()
        else:
            self._then = afterwards

    def perform(self) -> tuple[object, BaseException | None]:
        """Call the function, in a thread; return its value, or its error."""
        if self._result.cancelled():
            return None, None
        try:
            return self._function(), None
        except BaseException as error:  # noqa: BLE001 (passed to the waiting task)
            return None, error

    def finish(self, outcome: tuple[object, BaseException | None]) -> None:
        """Set the outcome, on the event loop."""
        self.returned = True
        if not self._result.done():
            self._result.set_result(outcome)
        if self._then is not None:
            self._then()


class Threads:
    """At most `limit` threads, started as they are needed. Belongs to the event loop that calls it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._started = 0
        self._busy = 0
        """Calls that run or wait for a thread, abandoned ones included."""
        self._work: SimpleQueue[tuple[Call, asyncio.AbstractEventLoop] | None] = SimpleQueue()
        self._idle = Waiters()
        """Wakes tasks that wait for the last call to return."""

    def __repr__(self) -> str:
        return f"<Threads: {self._busy} calls, {self._started} of {self._limit} threads>"

    def start(self, function: Callable[[], object]) -> Call:
        """Call `function` in a thread, as soon as one is free."""
        loop = asyncio.get_running_loop()
        call = Call(function, loop)
        self._busy += 1
        if self._started < min(self._busy, self._limit):
            self._started += 1
            threading.Thread(target=self._serve, name=f"penstock environment {self._started}", daemon=True).start()
        self._work.put((call, loop))
        return call

    async def call(self, function: Callable[[], Any], began: Callable[[Call], None] | None = None) -> Any:
        """Return the result of `function`: a coroutine function runs on the event loop, any other in a thread.

        `began` receives the call that runs in a thread. Cancellation abandons it.
        """
        if _is_async(function):
            return await function()
        call = self.start(function)
        if began is not None:
            began(call)
        value = await call
        return await value if inspect.isawaitable(value) else value

    async def wait_idle(self) -> None:
        """Wait until every call has returned, abandoned ones too."""
        while self._busy:
            await self._idle.wait()

    def close(self) -> None:
        """End the threads, each after its current call."""
        for _ in range(self._started):
            self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            call, loop = work
            outcome = call.perform()
            with contextlib.suppress(RuntimeError):  # the loop is closed, and no task waits
                loop.call_soon_threadsafe(self._finish, call, outcome)

    def _finish(self, call: Call, outcome: tuple[object, BaseException | None]) -> None:
        self._busy -= 1
        call.finish(outcome)
        if not self._busy:
            self._idle.wake_all()


def _is_async(function: Callable[[], Any]) -> bool:
    """Return whether it is a coroutine function, an object with such a `__call__`, or a partial of either."""
    called = function.func if isinstance(function, partial) else function
    return inspect.iscoroutinefunction(called) or inspect.iscoroutinefunction(getattr(called, "__call__", None))  # noqa: B004 (inspected, not called)
