"""Run a stage in a worker; the child's side, whether a process of this host or an actor of Ray runs it.

Its messages are never pickled: records and reports travel on the channel to its parent.
"""

from __future__ import annotations

import asyncio
import os
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, TypeAlias

import anyio
import msgspec

from ..._schemas import TrajectoryGroup, TrajectoryId
from ..._schemas.bounds import LONGEST_TRACEBACK, MOST_ENTRIES, batched, cut
from ..accounting.epoch import UNKNOWN
from ..accounting.ledger import Ledger
from ..accounting.repetition_sets import iter_bits, masks_by_group
from ..accounting.shared_counters import EndState, SharedCounters
from ..accounting.telemetry import Metrics, report_waits
from ..channels.keys import ChannelKey
from ..channels.remote_sender import RemoteSender
from ..channels.transports import connect, serve
from ..errors import LedgerImbalance, PenstockError, SenderRejected, StageFailed
from ..graph.context import Assignments, Context, current, entered
from ..graph.edge import CountingSendChannel, EdgeCounter
from ..util.exception_groups import consists_of
from ..util.user_code import await_user, raised_text
from .loop_watch import LoopWatch, checked_in_thread, counted_in
from .numa import bind_to_node
from .worker_messages import (
    RECORDS,
    WORKER_END_STATES,
    Connected,
    Dies,
    Ending,
    Serving,
    StageConfig,
    Starting,
    WorkerEndState,
    WorkerEvent,
    WorkerReport,
)

REPORT_INTERVAL_S = 0.1
"""Least seconds between two reports, which are sent with a record, after a failed rollout and, in a middle stage,
after any end: the parent may be waiting for those trajectories."""

IDLE_REPORT_S = 0.5
"""Seconds between reports of the counts that the parent cannot read itself."""

Report: TypeAlias = Callable[[WorkerEvent], None]
"""Reports an event to the parent."""


class Link(NamedTuple):
    """The way of a worker to its parent."""

    outbox_url: str
    """The URL of the parent's channel."""
    inbox_url: str
    """The URL at which the worker of a middle stage serves its inbox; port 0 for any."""
    key: ChannelKey | None
    """The key of both, over tcp."""
    node: str
    """The address of this host; empty on the parent's."""
    report: Report | None
    """Reports its events; None where they travel with the records, and its counts too."""
    watched: int | None = None
    """Descriptor of the file for the watch on its event loop; None where a thread here checks it."""


class _ReportingLedger(Ledger):
    """The ledger of a worker whose trajectories its parent's ledger holds: collects their ends for it."""

    def __init__(self) -> None:
        super().__init__(admits_on_end=True)
        self.endings: list[Ending] = []
        """Ends that were not yet reported to the parent."""

    def end(self, what: TrajectoryGroup | Iterable[TrajectoryId], state: EndState, reason: str = "") -> None:
        """Count the end of trajectories, and add it to the next report."""
        if state == "trained":
            raise LedgerImbalance("expected trajectories that the trainer's process trains, got some that a worker has")
        kept = what if isinstance(what, TrajectoryGroup) else list(what)
        for group, mask in masks_by_group(kept):
            self.endings.append(Ending(group, tuple(iter_bits(mask)), state, cut(reason)))
        super().end(kept, state, reason)  # it never raises, for it admits what it does not know; its listeners report


# -- beginning and end ---------------------------------------------------------------------------------------------

_importing_main = False


@contextmanager
def importing_main() -> Iterator[None]:
    """Have `refuse_while_importing_main` refuse within the body."""
    global _importing_main  # noqa: PLW0603 (read by a pipeline that the script runs on import)
    _importing_main = True
    try:
        yield
    finally:
        _importing_main = False


def refuse_while_importing_main() -> None:
    """Refuse to run a pipeline while a worker imports its parent's script, which would start the run again.

    Raises:
        RuntimeError: the script is being imported.
    """
    if _importing_main:
        raise RuntimeError(
            "a worker imported the script that started it, and the script ran a pipeline: "
            "expected the run to be under `if __name__ == '__main__':`"
        )


def description_of(error: BaseException) -> str:
    """Return a description of `error`, as the end of a sentence that begins with the worker's name."""
    if isinstance(error, StageFailed):  # within a fragment
        return cut(f"failed: {error}")
    return cut(f"raised {raised_text(error)}")


def traceback_of(error: BaseException) -> str:
    """Return the traceback without the frames before the stage's; empty for an error of penstock, which says it all."""
    if isinstance(error, PenstockError) and not isinstance(error, StageFailed):
        return ""
    error.__traceback__ = _from_the_stage_on(error.__traceback__)
    text = "".join(traceback.format_exception(error))
    return text if len(text) <= LONGEST_TRACEBACK else "…" + text[1 - LONGEST_TRACEBACK :]


def _from_the_stage_on(frames: TracebackType | None) -> TracebackType | None:
    start, frame = frames, frames
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == __file__ and frame.tb_next is not None:
            start = frame.tb_next
        frame = frame.tb_next
    return start


# -- running the stage ---------------------------------------------------------------------------------------------


async def run_stage(stage: Any, config: StageConfig, counters: SharedCounters, link: Link) -> None:
    """Run `stage` until it returns.

    Args:
        stage: a Source, or a Stage where the worker has an inbox.
        config: the configuration of this start.
        counters: the counters of a source's ledger.
        link: the way to the parent.

    Raises:
        Exception: what the stage raised.
    """
    if link.report is not None:
        link.report(Starting(f"connecting to {link.outbox_url}"))
    async with connect(
        link.outbox_url,
        RECORDS[config.channels.outbox_kind],
        name=config.name,
        key=link.key,
        heartbeat_timeout_s=None,
    ) as sender:
        await run_connected(stage, config, counters, link, sender)


async def run_connected(
    stage: Any,
    config: StageConfig,
    counters: SharedCounters,
    link: Link,
    sender: RemoteSender[Any],
    *,
    assignments: Assignments | None = None,
) -> None:
    """Run `stage` until it returns, or the parent closes the channel, which `sender` sends on; see `run_stage`.

    Raises:
        SenderRejected: the parent disconnected this worker.
        Exception: what the stage raised.
    """
    ledger = _ReportingLedger() if config.channels.held_by_parent else Ledger(counters)
    if config.channels.per_step:
        ledger.expect_per_step(config.channels.per_step / config.worker.count)
    metrics = Metrics()
    reports = _ReportSender(sender, ledger, metrics, counters if link.report is None else None)
    with (
        _watched(config, link, reports) as watch,
        entered(Context(ledger, metrics, config.worker, assignments=assignments, watch_loop=watch.within)) as context,
    ):
        report = link.report or reports.send_event
        numa = bind_to_node(config.worker.on_host)
        report(Connected(link.outbox_url.partition("://")[0], os.getpid(), link.node, numa))
        sender.on_ended(context.ledger.settle)
        sender.on_published(context.ledger.note_published)
        context.ledger.step = max(context.ledger.step, counters.step)  # from now on it is notified of each step
        context.metrics.send_evaluation = reports.flush
        admits_to = None if config.channels.held_by_parent else context.ledger
        outbox = CountingSendChannel(sender.clone(), EdgeCounter(admits_to, on_sent=reports.flush_if_due))
        try:
            with ledger.on_end(reports.flush_soon):
                async with _watching(sender, reports, link):
                    await _run_stage(stage, config, outbox, report, link)
        except Exception as error:
            if not consists_of(error, sender.failure):
                raise
            # The stage after this one has ended and closed the channel: this one is done too.
        finally:
            reports.close()
            await outbox.close_all()
    if isinstance(sender.failure, SenderRejected):  # its stage ended with the channel, and not with its work
        raise sender.failure


def _watched(config: StageConfig, link: Link, reports: _ReportSender) -> AbstractContextManager[LoopWatch]:
    """Return the watch on the event loop of this worker."""
    if link.watched is not None:
        return counted_in(link.watched)
    return checked_in_thread(config.name, partial(_die, config.name, reports))


def _die(name: str, reports: _ReportSender, why: str) -> NoReturn:
    """End this process, whose event loop is blocked, once the pipeline has the reason."""
    try:
        reports.send_last(Dies(cut(why)))
    finally:
        os.write(2, f"{name} {why}\n".encode())  # not by a log, whose lock the blocked thread may have
        os._exit(1)


async def _run_stage(
    stage: Any, config: StageConfig, outbox: CountingSendChannel[Any], report: Report, link: Link
) -> None:
    metrics = current().metrics
    if config.channels.inbox_kind:
        async with _served(config, report, link) as inbox:
            with report_waits(metrics, config.stage, lambda: _waited(outbox, inbox)):
                await await_user(stage.run, inbox, outbox)
    else:
        with report_waits(metrics, config.stage, lambda: _waited(outbox)):
            await await_user(stage.run, outbox)


def _waited(outbox: CountingSendChannel[Any], inbox: Any = None) -> tuple[float, float]:
    return inbox.statistics().waited_s if inbox else 0.0, outbox.waits[1]


@asynccontextmanager
async def _served(config: StageConfig, report: Report, link: Link) -> AsyncIterator[Any]:
    async with serve(
        link.inbox_url,
        RECORDS[config.channels.inbox_kind],
        capacity=config.channels.inbox_capacity,
        capacity_bytes=config.channels.inbox_capacity_bytes,
        max_senders=1,
        name=config.name,
        key=link.key,
        heartbeat_timeout_s=None,
    ) as inbox:
        report(Serving(inbox.url))
        yield inbox


@asynccontextmanager
async def _watching(sender: RemoteSender[Any], reports: _ReportSender, link: Link) -> AsyncIterator[None]:
    """Cancel the body where the parent closes the channel, if nothing else stops this worker; report regularly."""
    if link.report is not None:
        yield
        return
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reports.flush_regularly)
        tasks.start_soon(_cancel_when_closed, sender, tasks.cancel_scope)
        yield
        tasks.cancel_scope.cancel()


async def _cancel_when_closed(sender: RemoteSender[Any], scope: anyio.CancelScope) -> None:
    await sender.wait_failed()
    scope.cancel()


class _ReportSender:
    """Sends reports of the stage's observations, and of the trajectories that ended in it."""

    def __init__(
        self, sender: RemoteSender[Any], ledger: Ledger, metrics: Metrics, counters: SharedCounters | None
    ) -> None:
        self._sender = sender
        self._ledger = ledger
        self._metrics = metrics
        self._counters = counters
        """The counts to report; None where the parent reads them itself."""
        self._counts: list[int] = []
        """The counts of the last report."""
        self._last = 0.0
        self._later: asyncio.TimerHandle | None = None
        """The report that will be sent when it is due."""
        self._reasons: dict[WorkerEndState, dict[str, int]] = {}
        """The reasons of the last report."""
        self._epoch = UNKNOWN
        """The epoch of the last report."""

    def flush_if_due(self) -> None:
        """Send a report, unless one was sent within `REPORT_INTERVAL_S`."""
        if self._due_in_s <= 0:
            self._last = time.monotonic()
            self.flush()

    def flush_soon(self) -> None:
        """Send a report when one is due: no record may follow."""
        if self._later is None:
            self._later = asyncio.get_running_loop().call_later(max(0.0, self._due_in_s), self._flush_later)

    def _flush_later(self) -> None:
        self._later, self._last = None, time.monotonic()
        self.flush()

    @property
    def _due_in_s(self) -> float:
        return self._last + REPORT_INTERVAL_S - time.monotonic()

    def close(self) -> None:
        """Send the last report."""
        if self._later is not None:
            self._later.cancel()
        self.flush()

    def flush(self) -> None:
        """Send a report of everything since the last one, if there is anything."""
        metrics, ledger = self._metrics, self._ledger
        endings: list[Ending] = []
        reasons: dict[WorkerEndState, dict[str, int]] = {}
        if isinstance(ledger, _ReportingLedger):
            endings, ledger.endings = ledger.endings, []
        else:
            found = ledger.balance().reasons
            reasons = {state: found[state] for state in WORKER_END_STATES if found[state]}
        observations = metrics.take().within_bounds() if metrics else None
        now = reasons, self._count(), ledger.epoch
        if observations is not None or endings or now != (self._reasons, self._counts, self._epoch):
            self._reasons, self._counts, self._epoch = now
            first, *others = batched(endings, MOST_ENTRIES) if endings else ((),)
            self._send(WorkerReport(observations, first, reasons, self._counts, epoch=self._epoch))
            for further in others:
                self._send(WorkerReport(None, further, reasons, self._counts, epoch=self._epoch))

    def send_event(self, event: WorkerEvent) -> None:
        """Send an event, where nothing else reports it."""
        self._send(self._report_of(event))

    def send_last(self, event: WorkerEvent) -> None:
        """Send an event, and wait until the parent has it; see `RemoteSender.send_last`."""
        self._sender.send_last(msgspec.msgpack.encode(self._report_of(event)))

    def _report_of(self, event: WorkerEvent) -> WorkerReport:
        return WorkerReport(None, (), self._reasons, self._count(), event, epoch=self._epoch)

    def _count(self) -> list[int]:
        return self._counters.counts() if self._counters is not None else []

    def _send(self, report: WorkerReport) -> None:
        self._sender.send_telemetry(msgspec.msgpack.encode(report))

    async def flush_regularly(self) -> None:
        """Send reports while nothing is sent: a rollout may take minutes."""
        while True:
            await anyio.sleep(IDLE_REPORT_S)
            self.flush()
