"""`Waiters` against a queue of names: the order of wake-ups, with any cancellations."""

from __future__ import annotations

import asyncio

from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.models.explore import hold
from tests.models.machine import PICKS, any_of

from penstock._pipeline.util.waiting import Waiters

__all__ = ["WAITING_RULES", "WaitingMachine"]

IN_ORDER = "tasks are woken in the order of waiting, and one that keeps the first place before them"
PASSED_ON = "a wake-up is not lost: one that reaches a cancelled task wakes the next"
WAITING = "a task that was not woken waits"

WAITING_RULES = (IN_ORDER, PASSED_ON, WAITING)

TURNS = 6
"""Passes of the event loop after which all effects are done: a wake-up is passed on within two."""


class WaitingMachine(RuleBasedStateMachine):
    """Tasks wait, are woken and are cancelled; the event loop runs only sometimes."""

    waiters: type[Waiters] = Waiters

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.real = type(self).waiters()
        self.tasks: list[asyncio.Task[None]] = []
        self.went_on: list[int] = []
        self.queue: list[int] = []
        """Waiting tasks, by number."""
        self.woken: list[int] = []
        """Woken tasks, in order."""

    async def _wait(self, number: int, *, first: bool) -> None:
        await self.real.wait(first=first)
        self.went_on.append(number)

    def _settle(self) -> None:
        async def turns() -> None:
            for _ in range(TURNS):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())

    @rule()
    def come(self) -> None:
        self.queue.append(self._start(first=False))

    @rule()
    def come_first(self) -> None:
        self.queue.insert(0, self._start(first=True))

    def _start(self, *, first: bool) -> int:
        self.go_on()
        number = len(self.tasks)
        self.tasks.append(self.loop.create_task(self._wait(number, first=first)))
        self._settle()
        return number

    @rule()
    def wake_one(self) -> None:
        self.real.wake_one()
        self._wake()

    def _wake(self) -> None:
        if self.queue:
            self.woken.append(self.queue.pop(0))

    @rule()
    def wake_all(self) -> None:
        self.real.wake_all()
        while self.queue:
            self._wake()

    @precondition(lambda self: self.queue)
    @rule(pick=PICKS)
    def cancel_one_that_waits(self, pick: int) -> None:
        self.go_on()
        number = any_of(self.queue, pick)
        at_the_head = number == self.queue[0]
        self.tasks[number].cancel()
        self.queue.remove(number)
        if at_the_head:  # credit that is too little for it may be enough for the next
            self._wake()
        self.go_on()

    @precondition(lambda self: self.woken)
    @rule(pick=PICKS)
    def cancel_one_that_was_woken(self, pick: int) -> None:
        number = any_of(self.woken, pick)
        self.tasks[number].cancel()
        self.woken.remove(number)
        self._wake()

    @rule()
    def go_on(self) -> None:
        before = len(self.went_on)
        self._settle()
        went_on = self.went_on[before:]
        hold(PASSED_ON, len(went_on) >= len(self.woken), f"{went_on} of {self.woken}")
        hold(IN_ORDER, went_on == self.woken, f"{went_on} of {self.woken}")
        self.woken = []

    @invariant()
    def those_who_were_not_woken_wait(self) -> None:
        hold(WAITING, not any(self.tasks[number].done() for number in self.queue), self.queue)
        hold(WAITING, bool(self.real) or not self.queue, self.queue)

    def teardown(self) -> None:
        for task in self.tasks:
            task.cancel()
        self._settle()
        self.loop.close()
