"""Run a stage in a worker; the child's side, wherever it runs.

Its messages are never pickled: records and reports travel on the channel to the pipeline, instructions on the way back.
"""

from __future__ import annotations

import asyncio
import os
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, TypeAlias

import anyio
import msgspec

from ..._schemas import GroupId, InvalidRecord, TrainBatch, TrajectoryGroup, TrajectoryId
from ..._schemas.bounds import LONGEST_TRACEBACK, MOST_ENTRIES, batched, cut
from ..accounting.end_states import EndState
from ..accounting.epoch import UNKNOWN
from ..accounting.ledger import Ledger
from ..accounting.repetition_sets import iter_bits, mask_of, masks_by_group
from ..accounting.telemetry import Metrics, Observations, report_waits
from ..channels.keys import ChannelKey
from ..channels.remote_sender import RemoteSender
from ..channels.transports import connect, serve
from ..errors import LedgerImbalance, PenstockError, SenderRejected, StageFailed
from ..graph.assignment import Assignment
from ..graph.context import Context, current, entered
from ..graph.edge import CountingSendChannel, EdgeCounter
from ..graph.stage_info import stated_tokenizers
from ..util.cancelling import cancelled_after
from ..util.exception_groups import consists_of, single_exception
from ..util.user_code import await_user, raised_text
from .loop_watch import LoopWatch, checked_in_thread, counted_in
from .numa import bind_to_node
from .worker_messages import (
    RECORDS,
    Assigned,
    Connected,
    Dies,
    Ending,
    Failed,
    Finished,
    Joined,
    Joins,
    Serving,
    StageConfig,
    Wants,
    WorkerEvent,
    WorkerInstruction,
    WorkerReport,
    decode_instruction,
)

REPORT_INTERVAL_S = 0.1
"""Least seconds between two reports, which are sent with a record, and after any end: the pipeline may be waiting for
those trajectories."""

IDLE_REPORT_S = 0.5
"""Seconds between reports while no record is sent."""

Report: TypeAlias = Callable[[WorkerEvent], None]
"""Reports an event to the pipeline."""


@dataclass(frozen=True, slots=True)
class WithTokenizer:
    """A stage with the tokenizer of its pipeline, as they are pickled to a worker."""

    stage: Any
    tokenizer: Any

    async def run(self, *ends: Any) -> None:
        """Run the stage."""
        with entered(replace(current(), tokenizer=self.tokenizer)):
            await self.stage.run(*ends)


class Link(NamedTuple):
    """The way of a worker to its pipeline."""

    outbox_url: str
    """The URL of the pipeline's channel."""
    outbox_kind: str
    """Key of `RECORDS`."""
    inbox_url: str
    """The URL where the worker of a middle stage serves its inbox; port 0 for any."""
    key: ChannelKey | None
    """The key of both, over tcp."""
    node: str
    """The address of this host; empty on the pipeline's."""
    watched: int | None = None
    """Descriptor of the file for the watch on its event loop; None where a thread here checks it."""


class WorkerLedger(Ledger):
    """The ledger of a worker: the pipeline's holds its trajectories, and this one collects their ends."""

    def __init__(self) -> None:
        super().__init__(admits_on_end=True)
        self.endings: list[Ending] = []
        """Ends that were not yet reported."""
        self.succeeded: int = 0
        """Rollouts that succeeded, and were not yet reported."""

    def admit(self, group: GroupId, repetitions: Iterable[int]) -> int:  # noqa: ARG002 (it admits when they arrive)
        """Return the number of these trajectories: the pipeline admits them."""
        return mask_of(repetitions).bit_count()

    def hand_over(self, record: TrajectoryGroup | TrainBatch) -> int:  # noqa: ARG002 (as `admit`)
        """Return no copies: the pipeline refuses them when they arrive."""
        return 0

    def take_back(self, record: TrajectoryGroup | TrainBatch) -> None:
        """Return: it was not admitted here."""

    def succeed(self, count: int = 1) -> None:
        """Count rollouts that succeeded, for the next report."""
        self.succeeded += count

    def end(self, what: TrajectoryGroup | Iterable[TrajectoryId], state: EndState, reason: str = "") -> None:
        """Count the end of trajectories, and add it to the next report."""
        if state == "trained":
            raise LedgerImbalance("expected trajectories that the trainer's process trains, got some that a worker has")
        kept = what if isinstance(what, TrajectoryGroup) else list(what)
        for group, mask in masks_by_group(kept):
            self.endings.append(Ending(group, tuple(iter_bits(mask)), state, cut(reason)))
        super().end(kept, state, reason)  # it never raises, for it admits what it does not know; its listeners report


class Instructions:
    """The instructions of the pipeline to one worker."""

    def __init__(self, sender: RemoteSender[Any]) -> None:
        self._sender = sender
        self._queue: asyncio.Queue[WorkerInstruction] = asyncio.Queue()
        sender.on_instruction(lambda payload: self._queue.put_nowait(decode_instruction(payload)))

    @property
    def empty(self) -> bool:
        """Return whether no instruction waits."""
        return self._queue.empty()

    async def next(self) -> WorkerInstruction:
        """Return the next one, waiting for it."""
        return await self._queue.get()

    async def place(self, digest: str = "") -> WorkerInstruction | None:
        """Ask for a place, and return the answer; None where the connection ends without one."""
        send_event(self._sender, Joins(digest))
        async with cancelled_after(self._sender.wait_failed):
            return await self.next()
        # The pipeline ends the connection of a worker that it gives no place, right after the reason.
        return None if self.empty else await self.next()


class _Prompts:
    """The prompts that the pipeline assigns; `Assignments`."""

    def __init__(self, instructions: Instructions, report: Report) -> None:
        self._instructions = instructions
        self._report = report
        self._asked = 0
        """Requests that were not answered yet."""

    async def next(self, room: int = 1) -> Sequence[Assignment]:
        """Return the next prompts; empty if no more come."""
        if self._asked or self._instructions.empty:  # else the rest of a window is here
            for _ in range(self._asked, room):
                self._report(Wants())
            self._asked = max(self._asked, room)
        instruction = await self._instructions.next()
        self._asked = max(0, self._asked - 1)
        if not isinstance(instruction, Assigned):
            return ()
        ledger = current().ledger
        ledger.note_step(instruction.step)
        if instruction.published is not None:
            ledger.note_published(instruction.published)
        return [Assignment(group, mask_of(repetitions)) for group, repetitions in instruction.prompts]


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
    """Refuse to run a pipeline while a worker imports its parent's script: that would start the run again.

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
    """Return the traceback without the frames before the stage's; empty for an error of penstock: it says enough."""
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


async def run_stage(
    load: Callable[[], Any], name: str, link: Link, *, if_stopped: WorkerEvent | None = None
) -> WorkerEvent | None:
    """Run a stage until it returns, in the place that the pipeline gives to the worker called `name`.

    Args:
        load: returns the stage: a Source, or a Stage where the worker has an inbox.
        name: the name of the worker.
        link: the way to the pipeline.
        if_stopped: the event that is reported where this is cancelled.

    Returns:
        The event that it has reported last: `Finished`, or `Failed` where the stage raised. None where the pipeline
        has closed the channel before.
    """
    event: WorkerEvent | None = None
    connecting = connect(link.outbox_url, RECORDS[link.outbox_kind], name=name, key=link.key, heartbeat_timeout_s=None)
    async with connecting as sender:
        instructions = Instructions(sender)
        if not isinstance(joined := await instructions.place(), Joined):
            return None
        try:
            await run_connected(load(), joined, link, sender, instructions)
            event = Finished()
        except anyio.get_cancelled_exc_class():
            event = if_stopped
            raise
        except BaseException as error:  # noqa: BLE001 (of the stage, which may raise anything)
            cause = single_exception(error)
            event = Failed(description_of(cause), traceback_of(cause))
        finally:
            if event is not None:
                send_event(sender, event)
    return event


def send_event(sender: RemoteSender[Any], event: WorkerEvent) -> None:
    """Report an event alone."""
    sender.send_telemetry(msgspec.msgpack.encode(WorkerReport.of(event)))


async def run_connected(
    stage: Any, joined: Joined, link: Link, sender: RemoteSender[Any], instructions: Instructions
) -> None:
    """Run `stage` in its place until it returns, or the pipeline closes the channel of `sender`.

    Raises:
        SenderRejected: the pipeline disconnected this worker.
        InvalidRecord: a record was changed before it was copied.
        Exception: that of the stage.
    """
    config, ledger, metrics = joined.config, WorkerLedger(), Metrics()
    ledger.step = joined.step
    reports = _ReportSender(sender, ledger, metrics)
    report = reports.send_event
    prompts = _Prompts(instructions, report) if config.channels.assigned else None
    with (
        _watched(config, link, reports) as watch,
        entered(
            Context(
                ledger,
                metrics,
                config.worker,
                assignments=prompts,
                schedule=config.channels.schedule,
                tokenizer=next(stated_tokenizers([stage]), None),
                watch_loop=watch.within,
            )
        ) as context,
    ):
        numa = bind_to_node(config.worker.on_host)
        report(Connected(link.outbox_url.partition("://")[0], os.getpid(), link.node, numa))
        sender.on_ended(lambda _group, _mask, _state, step: ledger.note_step(step))
        sender.on_published(ledger.note_published)
        context.metrics.send_evaluation = reports.flush
        outbox = CountingSendChannel(sender.clone(), EdgeCounter(on_sent=reports.flush_if_due))
        try:
            with ledger.on_end(reports.flush_soon):
                async with _watching(sender, reports):
                    await _run_stage(stage, config, outbox, report, link)
        except Exception as error:
            if not consists_of(error, sender.failure):
                raise
            # The stage after this one has ended and closed the channel: this one is done too.
        finally:
            reports.close()
            await outbox.close_all()
    if isinstance(sender.failure, SenderRejected | InvalidRecord):  # its stage has ended for that, with work left
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
async def _watching(sender: RemoteSender[Any], reports: _ReportSender) -> AsyncIterator[None]:
    """Cancel the body where the pipeline closes the channel; report regularly."""
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

    def __init__(self, sender: RemoteSender[Any], ledger: WorkerLedger, metrics: Metrics) -> None:
        self._sender = sender
        self._ledger = ledger
        self._metrics = metrics
        self._last = 0.0
        self._later: asyncio.TimerHandle | None = None
        """The report that will be sent when it is due."""
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
        ledger = self._ledger
        if self._metrics or ledger.endings or ledger.succeeded or ledger.epoch != self._epoch:
            self._send_all(self._metrics.take().within_bounds() if self._metrics else None, None)

    def send_event(self, event: WorkerEvent) -> None:
        """Send an event, with what has ended before: a worker holds no prompt that it has dropped when it asks."""
        self._send_all(None, event)

    def _send_all(self, observations: Observations | None, event: WorkerEvent | None) -> None:
        ledger = self._ledger
        endings, ledger.endings = ledger.endings, []
        succeeded, ledger.succeeded = ledger.succeeded, 0
        self._epoch = ledger.epoch
        *others, last = batched(endings, MOST_ENTRIES) if endings else [()]
        for part in others:
            self._send(WorkerReport(None, part, epoch=self._epoch))
        self._send(WorkerReport(observations, last, event, succeeded, self._epoch))

    def send_last(self, event: WorkerEvent) -> None:
        """Send an event, and wait until the parent has it; see `RemoteSender.send_last`."""
        self._sender.send_last(msgspec.msgpack.encode(WorkerReport(None, (), event, epoch=self._epoch)))

    def _send(self, report: WorkerReport) -> None:
        self._sender.send_telemetry(msgspec.msgpack.encode(report))

    async def flush_regularly(self) -> None:
        """Send reports while no record is sent: a rollout may take minutes."""
        while True:
            await anyio.sleep(IDLE_REPORT_S)
            self.flush()
