"""A producer and a consumer that are plain processes: `connect` and `serve`, one of them the victim."""

from __future__ import annotations

from contextlib import suppress

import anyio
from anyio.abc import TaskGroup
from tests.faults.actors import Setup, commit, digest, note_recovery, number_of, record_number
from tests.faults.cells import AT, COUNT, SEGMENT_BYTES

from penstock import ReceiveChannel, SendChannel, TrajectoryGroup
from penstock.accounting import Ledger
from penstock.channels import connect, serve
from penstock.errors import PeerClosed, PeerLost

__all__ = ["consume", "consume_with_fault", "produce", "produce_with_fault"]


# -- the producer is the victim --------------------------------------------------------------------------------------


async def produce_with_fault(setup: Setup) -> None:
    """Send records until the fault is injected, and continue if that is possible."""
    async with connect(await setup.receive_url(), TrajectoryGroup, name="the producer") as outbox:
        with suppress(PeerClosed):
            await _send_with_fault(setup, outbox)
    setup.log("failed with", str(outbox.failure))


async def _send_with_fault(setup: Setup, outbox: SendChannel[TrajectoryGroup]) -> None:
    moment, injector = setup.cell.moment, setup.injector
    injector.patch_moments()
    for number in range(AT if moment == "shutdown" else COUNT):
        if number == AT and moment == "idle":
            await injector.inject_when_idle()
        record = record_number(number)
        setup.log.sent(record)
        if number == AT and moment in {"writing", "published"}:
            await injector.send(outbox, record)
        else:
            await outbox.send(record)
    if moment == "shutdown":
        await injector.inject_while_closing(outbox)


async def consume(setup: Setup) -> None:
    """Commit the records of the victim until it has ended, or is disconnected."""
    ledger, held = Ledger(), record_number(0)
    note_recovery(setup.log)
    async with serve(
        "shm://",
        TrajectoryGroup,
        capacity=COUNT,
        capacity_bytes=SEGMENT_BYTES,
        name="the consumer",
        heartbeat_timeout_s=setup.cell.heartbeat_timeout_s,
    ) as inbox:
        setup.send_url(inbox.url)
        try:
            async for record in inbox:
                held = record
                commit(ledger, record)
                setup.log.committed(record)
        except PeerLost as error:
            setup.log.noticed(error)
    setup.log("balance", ledger.balance())
    if setup.cell.fault == "zombie":
        await _continue_without(setup)
    setup.log("held", number_of(held), digest(held))


async def _continue_without(setup: Setup) -> None:
    """Open another channel; the zombie, whose channel is closed, continues meanwhile."""
    async with serve("shm://", TrajectoryGroup) as inbox, connect(inbox.url, TrajectoryGroup) as outbox:
        setup.log("done")
        await setup.victim_ended()
        await outbox.send(record_number(COUNT))
        assert number_of(await inbox.receive()) == COUNT
        assert inbox.statistics().sent == 1


# -- the consumer is the victim --------------------------------------------------------------------------------------


async def consume_with_fault(setup: Setup) -> None:
    """Commit records until the fault is injected, and continue if that is possible."""
    async with serve("shm://", TrajectoryGroup, capacity=2, capacity_bytes=SEGMENT_BYTES, name="the consumer") as inbox:
        setup.send_url(inbox.url)
        async with anyio.create_task_group() as tasks:
            try:
                await _receive_with_fault(setup, inbox, tasks)
            except PeerLost as error:  # of a zombie: its peer has ended, which it may notice first
                setup.log("failed with", str(error))
            tasks.cancel_scope.cancel()
        if setup.cell.moment == "shutdown":
            await setup.injector.inject_while_closing(inbox)


async def _receive_with_fault(setup: Setup, inbox: ReceiveChannel[TrajectoryGroup], tasks: TaskGroup) -> None:
    moment, injector, ledger = setup.cell.moment, setup.injector, Ledger()
    injector.patch_moments()
    async for record in inbox:
        number = number_of(record)
        if (number, moment) == (AT, "reading"):
            injector.inject()
        commit(ledger, record)
        if (number, moment) == (AT, "committing"):
            injector.inject()
        setup.log.committed(record)
        del record
        if (number, moment) == (AT - 1, "idle"):
            tasks.start_soon(injector.inject_when_idle)
        if (number, moment) == (AT - 1, "shutdown"):
            return


async def produce(setup: Setup) -> None:
    """Send all records, unless the victim has ended, or is disconnected."""
    url = await setup.receive_url()
    async with connect(
        url, TrajectoryGroup, name="the producer", heartbeat_timeout_s=setup.cell.heartbeat_timeout_s
    ) as outbox:
        try:
            await _send_all(setup, outbox)
        except (PeerClosed, PeerLost) as error:
            setup.log.noticed(error)
    setup.log("done")


async def _send_all(setup: Setup, outbox: SendChannel[TrajectoryGroup]) -> None:
    for number in range(COUNT):
        if (number, setup.cell.moment) == (AT, "idle"):
            await setup.injected()
        record = record_number(number)
        setup.log.sent(record)
        await outbox.send(record)
        setup.log("accepted", number)
