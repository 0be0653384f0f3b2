"""A bounded number of threads for code that blocks and may never return: environments, reward functions.

Not `anyio.to_thread`: a call that hangs must not delay the end of the process, and must count against the bound even
when no task waits for it any more. So these threads are daemons, and an abandoned call keeps its thread until it
returns. Knows no particular function.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

from ..._pipeline.util.user_code import await_user, call_user
from ..._pipeline.util.waiting import Waiters


class Threads:
    """At most `limit` threads, started as they are needed. Belongs to the event loop that calls it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._started = 0
        self._calls: dict[Future[Any], Callable[[], Any] | None] = {}
        """Calls that run or wait for a thread, abandoned ones included, each with the function to call after it."""
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._idle = Waiters()
        """Wakes tasks that wait for the last call to return."""

    def __repr__(self) -> str:
        return f"<Threads: {len(self._calls)} calls, {self._started} of {self._limit} threads>"

    def start(self, function: Callable[[], Any]) -> Future[Any]:
        """Call `function` in a thread, as soon as one is free."""
        call: Future[Any] = Future()
        self._calls[call] = None
        call.add_done_callback(partial(self._notify, asyncio.get_running_loop()))
        if self._started < min(len(self._calls), self._limit):
            self._started += 1
            threading.Thread(target=self._serve, name=f"penstock environment {self._started}", daemon=True).start()
        self._work.put((call, function))
        return call

    def start_after(self, call: Future[Any], function: Callable[[], Any]) -> None:
        """Call `function` in a thread, once `call` has returned."""
        if call in self._calls:
            self._calls[call] = function
        else:
            self.start(function)

    async def call(self, function: Callable[[], Any], began: Callable[[Future[Any]], None] | None = None) -> Any:
        """Return the result of `function`: a coroutine function runs on the event loop, any other in a thread.

        `began` receives the call that runs in a thread. Cancellation abandons it.
        """
        if _is_async(function):
            return await await_user(function)
        call = self.start(function)
        if began is not None:
            began(call)
        value = await asyncio.wrap_future(call)
        return await await_user(lambda: value) if inspect.isawaitable(value) else value

    async def wait_idle(self) -> None:
        """Wait until every call has returned, abandoned ones too."""
        while self._calls:
            await self._idle.wait()

    def close(self) -> None:
        """End the threads, each after its current call."""
        for _ in range(self._started):
            self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            _perform(*work)

    def _notify(self, loop: asyncio.AbstractEventLoop, call: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and no task waits
            loop.call_soon_threadsafe(self._finish, call)

    def _finish(self, call: Future[Any]) -> None:
        if (then := self._calls.pop(call)) is not None:
            self.start(then)
        if not self._calls:
            self._idle.wake_all()


def _perform(call: Future[Any], function: Callable[[], Any]) -> None:
    """Call `function`, unless its call was abandoned."""
    if not call.set_running_or_notify_cancel():
        return
    try:
        call.set_result(call_user(function))
    except BaseException as error:  # noqa: BLE001 (passed to the waiting task)
        call.set_exception(error)


def _is_async(function: Callable[[], Any]) -> bool:
    """Return whether it is a coroutine function, an object with such a `__call__`, or a partial of either."""
    called = function.func if isinstance(function, partial) else function
    return inspect.iscoroutinefunction(called) or inspect.iscoroutinefunction(getattr(called, "__call__", None))  # noqa: B004 (inspected, not called)
