"""A producer and a consumer that are plain processes: `connect` and `serve`, one of them the victim."""

from __future__ import annotations

from contextlib import suppress

import anyio
from anyio.abc import TaskGroup
from tests.faults.actors import Play, commit, digest, note_recovery, number_of, record_number
from tests.faults.cells import AT, COUNT, SEGMENT_BYTES

from penstock import ReceiveChannel, SendChannel, TrajectoryGroup
from penstock.accounting import Ledger
from penstock.channels import connect, serve
from penstock.errors import PeerClosed, PeerLost

__all__ = ["consume", "consume_and_be_struck", "produce", "produce_and_be_struck"]


# -- the producer is struck ------------------------------------------------------------------------------------------


async def produce_and_be_struck(play: Play) -> None:
    """Send records until the blow falls, and go on with it if that is possible."""
    async with connect(await play.hear_url(), TrajectoryGroup, name="the producer") as outbox:
        with suppress(PeerClosed):
            await _send_and_be_struck(play, outbox)
    play.log("woke to", str(outbox.failure))


async def _send_and_be_struck(play: Play, outbox: SendChannel[TrajectoryGroup]) -> None:
    moment, striker = play.cell.moment, play.striker
    striker.lie_in_wait()
    for number in range(AT if moment == "shutdown" else COUNT):
        if number == AT and moment == "idle":
            await striker.strike_when_idle()
        record = record_number(number)
        play.log.sent(record)
        if number == AT and moment in {"writing", "published"}:
            await striker.send(outbox, record)
        else:
            await outbox.send(record)
    if moment == "shutdown":
        await striker.strike_while_closing(outbox)


async def consume(play: Play) -> None:
    """Commit what the victim sends until it is gone, or is given up."""
    ledger, held = Ledger(), record_number(0)
    note_recovery(play.log)
    async with serve(
        "shm://",
        TrajectoryGroup,
        capacity=COUNT,
        capacity_bytes=SEGMENT_BYTES,
        name="the consumer",
        heartbeat_timeout_s=play.cell.heartbeat_timeout_s,
    ) as inbox:
        play.tell_url(inbox.url)
        try:
            async for record in inbox:
                held = record
                commit(ledger, record)
                play.log.committed(record)
        except PeerLost as error:
            play.log.told(error)
    play.log("balance", ledger.balance())
    if play.cell.fault == "zombie":
        await _go_on_without(play)
    play.log("held", number_of(held), digest(held))


async def _go_on_without(play: Play) -> None:
    """The channel that the zombie knows is closed; it wakes while there is another one."""
    async with serve("shm://", TrajectoryGroup) as inbox, connect(inbox.url, TrajectoryGroup) as outbox:
        play.log("done")
        await play.gone()
        await outbox.send(record_number(COUNT))
        assert number_of(await inbox.receive()) == COUNT
        assert inbox.statistics().sent == 1


# -- the consumer is struck ------------------------------------------------------------------------------------------


async def consume_and_be_struck(play: Play) -> None:
    """Commit records until the blow falls, and go on with it if that is possible."""
    async with serve("shm://", TrajectoryGroup, capacity=2, capacity_bytes=SEGMENT_BYTES, name="the consumer") as inbox:
        play.tell_url(inbox.url)
        async with anyio.create_task_group() as tasks:
            try:
                await _receive_and_be_struck(play, inbox, tasks)
            except PeerLost as error:  # of a zombie: whoever gave it up is gone, and it may see that first
                play.log("woke to", str(error))
            tasks.cancel_scope.cancel()
        if play.cell.moment == "shutdown":
            await play.striker.strike_while_closing(inbox)


async def _receive_and_be_struck(play: Play, inbox: ReceiveChannel[TrajectoryGroup], tasks: TaskGroup) -> None:
    moment, striker, ledger = play.cell.moment, play.striker, Ledger()
    striker.lie_in_wait()
    async for record in inbox:
        number = number_of(record)
        if (number, moment) == (AT, "reading"):
            striker.strike()
        commit(ledger, record)
        if (number, moment) == (AT, "committing"):
            striker.strike()
        play.log.committed(record)
        del record
        if (number, moment) == (AT - 1, "idle"):
            tasks.start_soon(striker.strike_when_idle)
        if (number, moment) == (AT - 1, "shutdown"):
            return


async def produce(play: Play) -> None:
    """Send all records, unless the victim is gone, or is given up."""
    url = await play.hear_url()
    async with connect(
        url, TrajectoryGroup, name="the producer", heartbeat_timeout_s=play.cell.heartbeat_timeout_s
    ) as outbox:
        try:
            await _send_all(play, outbox)
        except (PeerClosed, PeerLost) as error:
            play.log.told(error)
    play.log("done")


async def _send_all(play: Play, outbox: SendChannel[TrajectoryGroup]) -> None:
    for number in range(COUNT):
        if (number, play.cell.moment) == (AT, "idle"):
            await play.struck()
        record = record_number(number)
        play.log.sent(record)
        await outbox.send(record)
        play.log("accepted", number)
