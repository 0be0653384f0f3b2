"""A pipeline of three stages, the middle one in a worker: the victim is the worker, or the process of the run."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
from tests.faults.actors import FaultInjector, Log, Setup, number_of, record_number
from tests.faults.cells import AT, COUNT, SEGMENT_BYTES, STOP_TIMEOUT_S, Cell

from penstock import ReceiveChannel, SendChannel, TrainBatch, TrajectoryGroup, current, drop, processes, source
from penstock.errors import StageFailed

__all__ = ["run_pipeline"]


@dataclass(frozen=True)
class Number:
    """The source."""

    setup: Setup

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        cell, injector = self.setup.cell, self.setup.injector
        supervisor = cell.role == "supervisor"
        try:
            for number in range(COUNT):
                if (number, cell.moment) == (AT, "idle"):
                    await self.setup.injected()
                record = record_number(number)
                self.setup.log.sent(record)
                if number == AT and supervisor and cell.moment in {"writing", "published"}:
                    await injector.send(outbox, record)
                else:
                    await outbox.send(record)
        except anyio.get_cancelled_exc_class():
            if supervisor and (cell.fault, cell.moment) == ("exception", "shutdown"):
                injector.inject()
            raise


@dataclass(frozen=True)
class Middle:
    """Sends what it receives. If it is the victim, the fault is injected into the first process that runs it."""

    cell: Cell
    log: str
    """A path to the log."""

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        if self.cell.role == "middle" and not current().worker.restart:
            log = Log(os.open(self.log, os.O_WRONLY))  # for as long as the process lives
            await self._run_with_fault(FaultInjector(self.cell, log), inbox, outbox)
        else:
            async for record in inbox:
                await outbox.send(record)

    async def _run_with_fault(
        self, injector: FaultInjector, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]
    ) -> None:
        injector.patch_moments()
        async with anyio.create_task_group() as tasks:
            async for record in inbox:
                number, at = number_of(record), number_of(record) == AT
                if at and self.cell.moment == "reading":
                    await injector.inject_here()
                if at and self.cell.moment == "committing":
                    drop(record, "filtered", "by the middle")
                    await injector.inject_here()
                    continue
                if at and self.cell.moment in {"writing", "published"}:
                    await injector.send(outbox, record)
                else:
                    await outbox.send(record)
                if (number, self.cell.moment) == (AT - 1, "idle"):
                    tasks.start_soon(injector.inject_when_idle)
        if self.cell.moment == "shutdown":
            if self.cell.fault == "exception":
                await outbox.aclose()
                injector.inject()
            injector.armed = True  # Close follows


@asynccontextmanager
async def _bounded(setup: Setup) -> AsyncIterator[None]:
    """Cancel the body when a zombie has been stopped for the stop timeout."""
    async with anyio.create_task_group() as tasks:
        if setup.cell.fault == "zombie":
            tasks.start_soon(_cancel_after_timeout, setup, tasks.cancel_scope)
        yield
        tasks.cancel_scope.cancel()


async def _cancel_after_timeout(setup: Setup, scope: anyio.CancelScope) -> None:
    await setup.injected()
    await anyio.sleep(STOP_TIMEOUT_S)
    scope.cancel()


@dataclass(frozen=True)
class Train:
    """The sink."""

    setup: Setup

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        async with _bounded(self.setup), anyio.create_task_group() as tasks:
            async for record in inbox:
                number, at = number_of(record), number_of(record) == AT and self.setup.cell.role == "supervisor"
                if at and self.setup.cell.moment == "reading":
                    self.setup.injector.inject()
                ledger = current().ledger
                ledger.commit(TrainBatch.pack([record]), ledger.step + 1)
                if at and self.setup.cell.moment == "committing":
                    self.setup.injector.inject()
                self.setup.log.committed(record)
                del record
                if self.setup.cell.role == "supervisor" and (number, self.setup.cell.moment) == (AT - 1, "idle"):
                    tasks.start_soon(self.setup.injector.inject_when_idle)
                if at and self.setup.cell.moment == "shutdown":
                    self.setup.injector.armed = self.setup.cell.fault != "exception"
                    return


async def run_pipeline(setup: Setup) -> None:
    """Run the pipeline, and log its report."""
    if setup.cell.role == "supervisor":
        setup.injector.patch_moments()
    middle = Middle(setup.cell, f"/proc/{os.getpid()}/fd/{setup.log.fd}")
    on = processes(1, stop_timeout_s=STOP_TIMEOUT_S) if setup.cell.stops else processes(1)
    pipeline = (
        source(Number(setup))
        .then(middle, on=on, capacity=2, capacity_bytes=SEGMENT_BYTES)
        .sink(Train(setup), capacity=2, capacity_bytes=SEGMENT_BYTES)
    )
    try:
        await pipeline.run()
    except StageFailed as error:
        setup.log.noticed(str(error).partition("\n")[0])
    finally:
        report = pipeline.report
        assert report is not None
        restarts = report.statistics.stages[1].workers[0].restarts
        setup.log("report", report.balance, report.stop_reason, restarts)
