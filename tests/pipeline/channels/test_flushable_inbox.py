from __future__ import annotations

import anyio

from penstock import Context
from penstock.accounting import Ledger, Metrics
from penstock.channels import FlushableInbox, memory_channel
from penstock.testing import entered

MANY = 1000


def holds_some() -> bool:
    return True


async def test_other_tasks_run_while_records_are_there() -> None:
    outbox, inbox = memory_channel[int](MANY)
    received_before: list[int] = []
    received: list[int | None] = []

    async def other() -> None:
        received_before.append(len(received))

    async with inbox, anyio.create_task_group() as tasks:
        async with outbox:
            for number in range(MANY):
                outbox.send_nowait(number)
        tasks.start_soon(other)
        async for record in FlushableInbox(inbox, holds_some):
            received.append(record)  # noqa: PERF401 (looked at meanwhile)

    assert received == list(range(MANY))
    assert received_before[0] < MANY


async def test_a_cancellation_ends_it_while_records_are_there_and_loses_none() -> None:
    outbox, inbox = memory_channel[int](MANY)
    received: list[int | None] = []

    async with inbox, outbox:
        for number in range(MANY):
            outbox.send_nowait(number)
        with anyio.CancelScope() as scope:
            scope.cancel()
            async for record in FlushableInbox(inbox, holds_some):
                received.append(record)  # noqa: PERF401 (looked at meanwhile)

        assert scope.cancelled_caught
        assert inbox.receive_nowait() == len(received)


async def test_a_flush_comes_after_the_waiting_records_and_the_stream_continues() -> None:
    outbox, inbox = memory_channel[int](MANY)
    context = Context(Ledger(), Metrics())

    async with inbox, outbox:
        with entered(context):
            records = FlushableInbox(inbox, holds_some)
            outbox.send_nowait(1)
            context.flush.request()

            assert [await records.receive(), await records.receive()] == [1, None]

            context.flush.withdraw()
            outbox.send_nowait(2)
            assert await records.receive() == 2
