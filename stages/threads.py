"""A bounded number of threads for code that blocks and may never return: environments.

Not `anyio.to_thread`: a call that hangs must not hold up the end of the process, and has to go on counting against the
bound when nobody waits for it any more. So these threads are daemons, and an abandoned call keeps its thread until it
returns. Knows nothing of what it calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar, cast

from .._pipeline.waiting import Waiters

__all__ = ["Call", "Threads"]

R = TypeVar("R")


class Call:
    """A function on its way through a thread. Its fields change on the event loop only."""

    __slots__ = ("_answer", "_function", "_then", "returned")

    def __init__(self, function: Callable[[], object], loop: asyncio.AbstractEventLoop) -> None:
        self._function = function
        self._answer: asyncio.Future[tuple[object, BaseException | None]] = loop.create_future()
        """Cancelled when nobody waits any more."""
        self._then: Callable[[], object] | None = None
        self.returned = False
        """Whether the thread is done with it, or never began."""

    def __await__(self) -> Any:
        """Wait for what the function returns, or raises."""
        value, error = yield from self._answer.__await__()
        if error is not None:
            raise error
        return value

    def then(self, afterwards: Callable[[], object]) -> None:
        """Do `afterwards` on the event loop once the function has returned."""
        if self.returned:
            afterwards()
        else:
            self._then = afterwards

    def perform(self) -> tuple[object, BaseException | None]:
        """In a thread: the function's value, or its error."""
        if self._answer.cancelled():
            return None, None
        try:
            return self._function(), None
        except BaseException as error:  # noqa: BLE001 (handed to whoever waits)
            return None, error

    def finish(self, outcome: tuple[object, BaseException | None]) -> None:
        """On the event loop: hand over the outcome."""
        self.returned = True
        if not self._answer.done():
            self._answer.set_result(outcome)
        if self._then is not None:
            self._then()


class Threads:
    """At most `limit` threads, started as they are needed. Belongs to the event loop that calls it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._started = 0
        self._busy = 0
        """Calls that were begun or wait, abandoned ones included."""
        self._work: SimpleQueue[tuple[Call, asyncio.AbstractEventLoop] | None] = SimpleQueue()
        self._quiet = Waiters()
        """Wakes those who wait for the last call to return."""

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

    async def call(self, function: Callable[[], R]) -> R:
        """What `function` returns, or raises. Cancelled, it leaves the function to itself."""
        return cast("R", await self.start(function))

    async def quiet(self) -> None:
        """Wait until every call has returned, abandoned ones too."""
        while self._busy:
            await self._quiet.wait()

    def close(self) -> None:
        """Let the threads end, each after the call it is in."""
        for _ in range(self._started):
            self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            call, loop = work
            outcome = call.perform()
            with contextlib.suppress(RuntimeError):  # the loop has gone, and with it everyone who waited
                loop.call_soon_threadsafe(self._finish, call, outcome)

    def _finish(self, call: Call, outcome: tuple[object, BaseException | None]) -> None:
        self._busy -= 1
        call.finish(outcome)
        if not self._busy:
            self._quiet.wake_all()
