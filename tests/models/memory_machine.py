"""The memory channel against a list: with any cancellations, no record is lost or duplicated, and no task hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import anyio
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from tests.models.explore import hold
from tests.models.machine import PICKS, any_of, is_broken
from tests.models.waiting_machine import TURNS

from penstock.channels import MemoryReceiver, MemorySender, memory_channel

__all__ = ["MEMORY_RULES", "MemoryMachine"]

CAPACITY, CAPACITY_BYTES = 3, 10

BOUNDED = "a channel holds no more than its capacity, in records and in bytes"
ONCE = "a sent record is received once, in the order of sending"
UNDONE = "a cancelled send sends nothing, and a cancelled receive takes nothing"
AWAKE = "no task waits for a record or room that exists"
ENDS = "when one side has closed, no task of the other waits"

MEMORY_RULES = (BOUNDED, ONCE, UNDONE, AWAKE, ENDS)


@dataclass(frozen=True)
class Record:
    """A record with a size."""

    number: int
    nbytes: int


class MemoryMachine(RuleBasedStateMachine):
    """Tasks send, receive and are cancelled; the event loop runs only sometimes."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.outbox, self.inbox = self.channel()
        self.sending: dict[int, asyncio.Task[None]] = {}
        self.receiving: list[asyncio.Task[None]] = []
        self.sent: list[int] = []
        """Sent records, in order."""
        self.received: list[int] = []
        self.begun = 0

    def channel(self) -> tuple[MemorySender[Record], MemoryReceiver[Record]]:
        """Return the channel under test."""
        return memory_channel[Record](CAPACITY, CAPACITY_BYTES)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self.loop.create_task(work)

    @rule(nbytes=st.integers(0, CAPACITY_BYTES), tasks=st.integers(1, 3))
    def send(self, nbytes: int, tasks: int) -> None:
        for _ in range(tasks):
            record = Record(self.begun, nbytes)
            self.begun += 1
            self.sending[record.number] = self._start(self._send(record))

    async def _send(self, record: Record) -> None:
        await self.outbox.send(record)
        self.sent.append(record.number)

    @rule(tasks=st.integers(1, 3))
    def receive(self, tasks: int) -> None:
        self.receiving += [self._start(self._receive()) for _ in range(tasks)]

    async def _receive(self) -> None:
        record = await self.inbox.receive()
        self.received.append(record.number)

    @precondition(lambda self: self.sending)
    @rule(pick=PICKS)
    def cancel_a_send(self, pick: int) -> None:
        any_of(self.sending.values(), pick).cancel()

    @precondition(lambda self: self.receiving)
    @rule(pick=PICKS)
    def cancel_a_receive(self, pick: int) -> None:
        any_of(self.receiving, pick).cancel()

    @rule(nbytes=st.integers(0, CAPACITY_BYTES))
    def cancel_a_woken_task(self, nbytes: int) -> None:
        """Cancel the task that has waited longest between its wake-up and its turn."""
        self.come_to_rest()
        if self.receiving:
            self.outbox.send_nowait(Record(self.begun, nbytes))
            self.sent.append(self.begun)
            self.begun += 1
            self.receiving[0].cancel()
        elif self.sending:
            self.received.append(self.inbox.receive_nowait().number)
            next(iter(self.sending.values())).cancel()

    @rule()
    def take_a_turn(self) -> None:
        """Run one pass of the loop: woken tasks continue, and those that they wake do not."""
        self._turn(1)

    @rule()
    def come_to_rest(self) -> None:
        self._turn(TURNS * (len(self.sending) + len(self.receiving) + 1))
        held = self.outbox.statistics()
        hold(AWAKE, not (self.receiving and held.items), f"{len(self.receiving)} wait, and {held.items} are there")
        hold(AWAKE, not (self.sending and not held.items), f"{len(self.sending)} wait, and the channel is empty")

    def _turn(self, passes: int) -> None:
        async def turn() -> None:
            for _ in range(passes):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turn())
        for number in [number for number, task in self.sending.items() if task.done()]:
            task = self.sending.pop(number)
            undone = task.cancelled() or task.exception() is not None
            hold(UNDONE, undone != (number in self.sent), number)
        for task in [task for task in self.receiving if task.done()]:
            self.receiving.remove(task)
        self._compare()

    def _compare(self) -> None:
        held = self.outbox.statistics()
        counted = held.sent, held.received, held.items
        truth = len(self.sent), len(self.received), len(self.sent) - len(self.received)
        hold(UNDONE, counted == truth, f"{counted}, but {truth}")
        hold(BOUNDED, held.items <= CAPACITY and held.nbytes <= CAPACITY_BYTES, held)
        hold(ONCE, self.received == self.sent[: len(self.received)], f"{self.received} of {self.sent}")

    def teardown(self) -> None:
        try:
            if not is_broken():
                self.come_to_rest()
                self._close_one_side()
        finally:
            for task in [*self.sending.values(), *self.receiving]:
                task.cancel()
            self.loop.run_until_complete(asyncio.sleep(0))
            self.outbox.close()
            self.inbox.close()
            self.loop.close()

    def _close_one_side(self) -> None:
        waiting = [*self.sending.values(), *self.receiving]
        (self.outbox if self.receiving else self.inbox).close()
        self._turn(TURNS * (len(waiting) + 1))
        hold(ENDS, not self.sending and not self.receiving, f"{self.sending}, {self.receiving}")
        for task in waiting:
            error = task.exception()
            hold(ENDS, isinstance(error, anyio.EndOfStream | anyio.BrokenResourceError), repr(error))
