"""A pipeline of three stages, the middle one in a process of its own: its worker is struck, or who runs it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
from tests.faults.actors import Log, Play, Striker, number_of, record_number
from tests.faults.cells import AT, BOUND_S, COUNT, SEGMENT_BYTES, Cell

from penstock import ReceiveChannel, SendChannel, TrainBatch, TrajectoryGroup, current, drop, processes, source
from penstock.errors import StageFailed

__all__ = ["run_pipeline"]


@dataclass(frozen=True)
class Number:
    """The source."""

    play: Play

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        cell, striker = self.play.cell, self.play.striker
        supervisor = cell.role == "supervisor"
        try:
            for number in range(COUNT):
                if (number, cell.moment) == (AT, "idle"):
                    await self.play.struck()
                record = record_number(number)
                self.play.log.sent(record)
                if number == AT and supervisor and cell.moment in {"writing", "published"}:
                    await striker.send(outbox, record)
                else:
                    await outbox.send(record)
        except anyio.get_cancelled_exc_class():
            if supervisor and (cell.fault, cell.moment) == ("exception", "shutdown"):
                striker.strike()
            raise


@dataclass(frozen=True)
class Middle:
    """Passes on what it receives. Where it is the victim, the first process that runs it is struck."""

    cell: Cell
    log: str
    """A path to the log."""

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        if self.cell.role == "middle" and not current().worker.restart:
            log = Log(os.open(self.log, os.O_WRONLY))  # for as long as the process lives
            await self._be_struck(Striker(self.cell, log), inbox, outbox)
        else:
            async for record in inbox:
                await outbox.send(record)

    async def _be_struck(
        self, striker: Striker, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]
    ) -> None:
        striker.lie_in_wait()
        async with anyio.create_task_group() as tasks:
            async for record in inbox:
                number, at = number_of(record), number_of(record) == AT
                if at and self.cell.moment == "reading":
                    await striker.strike_here()
                if at and self.cell.moment == "committing":
                    drop(record, "filtered", "by the middle")
                    await striker.strike_here()
                    continue
                if at and self.cell.moment in {"writing", "published"}:
                    await striker.send(outbox, record)
                else:
                    await outbox.send(record)
                if (number, self.cell.moment) == (AT - 1, "idle"):
                    tasks.start_soon(striker.strike_when_idle)
        if self.cell.moment == "shutdown":
            if self.cell.fault == "exception":
                await outbox.aclose()
                striker.strike()
            striker.armed = True  # the goodbye follows


@asynccontextmanager
async def _patience(play: Play) -> AsyncIterator[None]:
    """Within the body a zombie is waited for no longer than the bound: whoever trains has enough then."""
    async with anyio.create_task_group() as tasks:
        if play.cell.fault == "zombie":
            tasks.start_soon(_give_up, play, tasks.cancel_scope)
        yield
        tasks.cancel_scope.cancel()


async def _give_up(play: Play, scope: anyio.CancelScope) -> None:
    await play.struck()
    await anyio.sleep(BOUND_S)
    scope.cancel()


@dataclass(frozen=True)
class Train:
    """The sink."""

    play: Play

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        async with _patience(self.play), anyio.create_task_group() as tasks:
            async for record in inbox:
                number, at = number_of(record), number_of(record) == AT and self.play.cell.role == "supervisor"
                if at and self.play.cell.moment == "reading":
                    self.play.striker.strike()
                ledger = current().ledger
                ledger.commit(TrainBatch.pack([record]), ledger.step + 1)
                if at and self.play.cell.moment == "committing":
                    self.play.striker.strike()
                self.play.log.committed(record)
                del record
                if self.play.cell.role == "supervisor" and (number, self.play.cell.moment) == (AT - 1, "idle"):
                    tasks.start_soon(self.play.striker.strike_when_idle)
                if at and self.play.cell.moment == "shutdown":
                    self.play.striker.armed = self.play.cell.fault != "exception"
                    return


async def run_pipeline(play: Play) -> None:
    """Run it, and log what it came to."""
    if play.cell.role == "supervisor":
        play.striker.lie_in_wait()
    middle = Middle(play.cell, f"/proc/{os.getpid()}/fd/{play.log.fd}")
    on = processes(1, stop_timeout_s=BOUND_S) if play.cell.stops else processes(1)
    pipeline = (
        source(Number(play))
        .then(middle, on=on, capacity=2, capacity_bytes=SEGMENT_BYTES)
        .sink(Train(play), capacity=2, capacity_bytes=SEGMENT_BYTES)
    )
    try:
        await pipeline.run()
    except StageFailed as error:
        play.log.told(str(error).partition("\n")[0])
    finally:
        report = pipeline.report
        assert report is not None
        restarts = report.statistics.stages[1].workers[0].restarts
        play.log("report", report.balance, report.stop_reason, restarts)
