"""Let tasks wait for each other: in order, without polling, and with a name for the cause of the wait.

`Waiters` never loses a wake-up: one that reaches a task in the moment it is cancelled is passed on to the next.
penstock runs on asyncio; futures are used where an anyio.Event would cost several times as much on the record path.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Self

import anyio

STEP_S = 1.0
"""Seconds that the wait for a process takes at a time."""


async def happens_within(event: anyio.Event, running_s: float) -> bool:
    """Wait for `event`, up to `running_s` in which the event loop runs, and return whether it is set.

    While code holds the loop, messages that arrive are not handled: that time is not the other side's.
    """
    while running_s > 0 and not event.is_set():
        step_s, begun_s = min(STEP_S, running_s), time.monotonic()
        with anyio.move_on_after(step_s):
            await event.wait()
        if time.monotonic() - begun_s < 2 * step_s:
            running_s -= step_s
    return event.is_set()


class Waiters:
    """Tasks that wait for one condition, woken in the order they came. Each must check the condition again."""

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        self._queue: deque[asyncio.Future[None]] = deque()
        """One for each waiting task, removed by the task itself: a task that was woken still counts until it runs."""

    def __bool__(self) -> bool:
        """Return whether any task waits: a new one must queue behind them."""
        return bool(self._queue)

    async def wait(self, *, first: bool = False) -> None:
        """Wait for a wake-up; `first` keeps the place of a task that was woken but could not proceed."""
        future = asyncio.get_running_loop().create_future()
        if first:
            self._queue.appendleft(future)
        else:
            self._queue.append(future)
        woken = False
        try:
            await future
            woken = True
        finally:
            at_the_head = self._queue[0] is future
            self._queue.remove(future)
            if not woken and (at_the_head or not future.cancelled()):
                self.wake_one()  # the wake-up that it did not use goes to the next task

    def wake_one(self) -> None:
        """Wake the task that has waited longest."""
        for future in self._queue:
            if not future.done():
                future.set_result(None)
                return

    def wake_all(self) -> None:
        """Wake all tasks: the condition holds for all of them, or never will."""
        for future in self._queue:
            if not future.done():
                future.set_result(None)


class WaitClock:
    """Records the cause of the present wait of one end of a channel, and its waits in all.

    Several tasks may share an end and wait at once: time is counted while any of them waits.
    """

    __slots__ = ("_name", "_since", "_total_s", "_waiting", "waiting_for")

    def __init__(self) -> None:
        self.waiting_for: str = ""
        """The cause of the present wait; empty without one."""
        self._name = ""
        self._since = 0.0
        self._total_s = 0.0
        self._waiting = 0

    @property
    def waited_s(self) -> float:
        """Seconds waited in all, the present wait included."""
        present = time.monotonic() - self._since if self.waiting_for else 0.0
        return self._total_s + present

    def waiting(self, what: str) -> Self:
        """Time the body of the `with` statement under the name `what`."""
        self._name = what
        return self

    def __enter__(self) -> None:
        if not self._waiting:
            self.waiting_for, self._since = self._name, time.monotonic()
        self._waiting += 1

    def __exit__(self, *_: object) -> None:
        self._waiting -= 1
        if not self._waiting:
            self._total_s += time.monotonic() - self._since
            self.waiting_for = ""
