"""One run of a chain of stages: channels are opened, stages run as tasks of one group, and everything ends together.

How a stage ends decides what happens to the others. It returned: what it feeds ends when all is received, and what
feeds it is cancelled, for nobody would receive it. It raised: all are cancelled, and the run raises `StageFailed`. A
run that is cancelled ends likewise, without a failure.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from itertools import pairwise
from typing import Any

import anyio

from .channels.channel import MEMORY_CAPACITY, SendChannel
from .channels.memory import memory_channel
from .context import Context, entered
from .edge import CountingSendChannel, Edge, EdgeCounter, StoppableReceiveChannel
from .errors import PeerClosed, RolloutsFailed, StageFailed
from .exception_groups import single_exception, unwrap_single
from .failure_streak import FailureStreak
from .ledger import Ledger
from .outcome import END_OF_STREAM, SWALLOWED
from .processes.placement import Here, Processes
from .processes.worker_accounting import RUN_ENDED
from .processes.workers import Workers
from .stage_node import StageNode
from .statistics import PipelineStatistics, StageState, StageStatistics
from .telemetry import get_logger, report_waits

__all__ = ["Run"]

log = get_logger("penstock.pipeline")


class _Outlet:
    """The end of a fragment whose last stage runs in processes: hands its records on to the channel outside."""

    async def run(self, inbox: Any, outbox: Any) -> None:
        async for record in inbox:
            await outbox.send(record)


class _StageTask:
    """One stage while it runs."""

    def __init__(self, node: StageNode, context: Context, run: Run) -> None:
        self.node = node
        self.context = Context(
            context.ledger,
            context.metrics,
            context.worker,
            flush=context.flush,
            nothing_on_the_way=lambda: run.nothing_before(self),
        )
        """Of its own, for what the stage drops is counted there."""
        self.state: StageState = "not started"
        self.scope = anyio.CancelScope()
        self.before: Edge | None = None
        """What it receives from; None for a source."""
        self.after: Edge | None = None
        """What it sends to; None for a sink."""
        self.outbox: CountingSendChannel[Any] | None = None
        self.workers: Workers | None = None
        """Its processes, where it does not run here."""

    @property
    def over(self) -> bool:
        """Whether it receives nothing any more."""
        return self.state not in {"not started", "running"}

    @property
    def stream_ended(self) -> bool:
        """Whether it returned, or had closed its end and only waited for the sink when that returned."""
        waited = self.state == "cancelled" and self.outbox is not None and self.outbox.all_closed
        return self.state == "returned" or waited

    def statistics(self) -> StageStatistics:
        """What it does now."""
        for_records_s, for_credit_s = self.waited()
        return StageStatistics(
            name=self.node.name,
            placement=str(self.node.on),
            state=self.state,
            waiting_for="" if self.over else self._waiting_for(),
            waited_for_records_s=for_records_s,
            waited_for_credit_s=for_credit_s,
            dropped={state: count for state, count in self.context.dropped.items() if count},
            workers=self.workers.statistics() if self.workers else (),
        )

    def waited(self) -> tuple[float, float]:
        """Seconds that it has waited in all, for records and for credit; its workers added up."""
        if self.workers is not None:
            return self.workers.waited
        records = self.before.inbox.statistics().waited_s if self.before else 0.0
        return records, self.outbox.waits[1] if self.outbox else 0.0

    def _waiting_for(self) -> str:
        workers = self.workers.statistics() if self.workers else ()
        starting = [worker.name for worker in workers if worker.state == "starting"]
        if starting:
            return f"start of {', '.join(starting)}"
        if self.before is not None and self.before.starved:
            return f"records from {self.before.upstream}"
        if self.after is not None and self.after.congested:
            return f"credit from {self.after.downstream}"
        return ""

    @property
    def unaccounted(self) -> int:
        """Trajectories that it received, and neither sent nor dropped."""
        received = self.before.counter.trajectories if self.before else 0
        sent = self.after.counter.trajectories if self.after else 0
        return max(0, received - sent - self.context.dropped.total())


class Run:
    """A chain of stages while it runs, and what can be said of it afterwards."""

    def __init__(self, nodes: Sequence[StageNode], context: Context, outbox: SendChannel[Any] | None = None) -> None:
        if outbox is not None and nodes[-1].remote:
            nodes = [*nodes, StageNode(_Outlet(), "outlet", Here())]
        self._context = context
        self._outbox = outbox
        """Where the last stage sends, when the chain is a fragment without a sink."""
        self._parts = [_StageTask(node, context, self) for node in nodes]
        self._edges: list[Edge] = []
        self._failure: StageFailed | RolloutsFailed | None = None
        self._streak = FailureStreak()
        self._open_error: Exception | None = None
        """What kept the run from opening its channels."""
        self._cancel: Callable[[], None] = _nothing
        self._opening = anyio.CancelScope()
        """Around the opening of the channels."""
        self._stopped_by = ""
        """What the run was told to stop by; empty where it was not."""
        self._inbox: StoppableReceiveChannel[Any] | None = None
        """What the sink receives from."""
        self._ran_dry = False
        """Whether every stage returned by itself and nothing was left between them."""
        self.in_flight_at_end = 0
        """Trajectories that were in flight when every stage had ended."""

    # -- from beginning to end ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run the chain until its last stage has returned.

        Raises:
            StageFailed: a stage raised.
            PenstockError: a channel could not be opened.
        """
        async with AsyncExitStack() as channels:
            try:
                with self._opening:
                    await self._join(channels)
            except Exception as error:
                self._open_error = error
                raise
            if self._opening.cancel_called:
                return
            channels.enter_context(self._context.ledger.calling_on_end(self._context.flush.look))
            channels.callback(self._finish)  # while the channels are still open
            with unwrap_single():
                async with anyio.create_task_group() as tasks:
                    self._cancel = tasks.cancel_scope.cancel
                    for part in self._parts:
                        tasks.start_soon(self._attend, part, name=part.node.name)
        if self._failure is not None:
            raise self._failure

    def stop(self, by: str) -> None:
        """End the run in good order: the sink's stream ends, and every stage before it is cancelled.

        Args:
            by: what it is stopped by, for people.
        """
        self._stopped_by = by
        if self._inbox is None:
            self._opening.cancel()
            return
        self._inbox.end()
        for part in self._parts[:-1]:
            part.scope.cancel()

    async def _attend(self, part: _StageTask) -> None:
        """Run one stage, and end what its end brings with it."""
        part.state = "running"
        try:
            with part.scope, entered(part.context), self._telling_waits(part):
                await self._body(part)
                part.state = "returned"
        except Exception as error:  # noqa: BLE001 (whatever a stage raises is reported with its name)
            self._note_failure(part, error)
        finally:
            if part.state == "running":
                part.state = "cancelled"
        if part.state == "returned":
            self._release_upstream(part)
            await _close_ends(part)

    def _telling_waits(self, part: _StageTask) -> AbstractContextManager[None]:
        if part.workers is not None:
            return nullcontext()
        return report_waits(self._context.metrics, part.node.name, part.waited)

    async def _body(self, part: _StageTask) -> None:
        if part.workers is not None:
            await part.workers.run(part.before.inbox if part.before else None)
        elif part.before is None:
            await part.node.stage.run(part.outbox)
        elif part.outbox is None:
            await part.node.stage.run(self._inbox)
        else:
            await part.node.stage.run(part.before.inbox, part.outbox)

    def limit_failures(self) -> None:
        """End the run where too many rollouts failed in a row: called after each that fails."""
        ledger = self._context.ledger
        try:
            self._streak.check(*ledger.failures(), lambda: ledger.balance().reasons["failed"])
        except RolloutsFailed as error:
            if self._failure is None:
                self._failure = error
                self._cancel()

    def _note_failure(self, part: _StageTask, error: Exception) -> None:
        if _is_only(error, PeerClosed) and self._is_over_after(part):
            return
        part.state = "failed"
        cause = single_exception(error)
        if self._stopped_by and part is not self._parts[-1]:
            log.warning("stage_failed_while_stopping", stage=part.node.name, error=_line(cause))
            return
        failure = cause if isinstance(cause, StageFailed) else StageFailed(f"{part.node.name} raised {_line(cause)}")
        if failure is not cause:
            failure.__cause__ = cause
        if self._failure is None:
            self._failure = failure
        else:
            self._failure.add_note(f"besides: {failure}")
            log.warning("stage_failed_too", stage=part.node.name, error=_line(cause))
        self._cancel()

    def _is_over_after(self, part: _StageTask) -> bool:
        """Whether the stage after `part` receives nothing any more, so that `part` need not send."""
        position = self._parts.index(part)
        return any(later.over for later in self._parts[position + 1 :])

    def _release_upstream(self, part: _StageTask) -> None:
        """Nobody will receive what the stages before `part` send. One that has closed its end may stay for the sink.

        When that has returned, it may stay on if it has said so (`Context.on_sink_returned`).
        """
        for earlier in self._parts[: self._parts.index(part)]:
            closed = earlier.outbox is not None and earlier.outbox.all_closed
            if part is self._parts[-1] and closed and earlier.context.on_sink_returned:
                for call in earlier.context.on_sink_returned:
                    call()
            elif part is self._parts[-1] or not closed:
                earlier.scope.cancel()

    def _finish(self) -> None:
        """Every stage has ended: note how things stand, and what workers still hold is lost."""
        channels = [edge.inbox.statistics() for edge in self._edges]
        empty = all(channel.sent == channel.received for channel in channels)
        self._ran_dry = empty and all(part.stream_ended for part in self._parts)
        self.in_flight_at_end = self._context.ledger.balance().in_flight
        for part in self._parts:
            if part.workers is not None:
                part.workers.close()

    # -- channels ----------------------------------------------------------------------------------------------------

    async def _join(self, channels: AsyncExitStack) -> None:
        """Open what lies between the stages."""
        for before, after in pairwise(self._parts):
            edge = await self._open(before, after, channels)
            before.after = after.before = edge
            before.outbox = edge.outbox
            self._edges.append(edge)
        if self._outbox is None:
            self._inbox = StoppableReceiveChannel(self._edges[-1].inbox)
        if self._outbox is not None:
            last = self._parts[-1]
            counter = EdgeCounter(self._admits_to(last), leaves=self._context.ledger)
            last.outbox = CountingSendChannel(self._outbox.clone(), counter)
            channels.push_async_callback(last.outbox.close_all)

    async def _open(self, before: _StageTask, after: _StageTask, channels: AsyncExitStack) -> Edge:
        counter = EdgeCounter(self._admits_to(before))
        if isinstance(before.node.on, Processes):
            inbox = await channels.enter_async_context(self._staffed(before, before.node.on, after, counter).serve())
            return Edge(before.node.name, after.node.name, inbox, counter, None)
        capacity = 1 if after.node.remote else after.node.capacity or MEMORY_CAPACITY
        sender, receiver = memory_channel[Any](capacity, after.node.capacity_bytes)
        channels.callback(receiver.close)
        outbox = CountingSendChannel(sender, counter)
        channels.push_async_callback(outbox.close_all)
        return Edge(before.node.name, after.node.name, receiver, counter, outbox)

    def _staffed(self, part: _StageTask, on: Processes, after: _StageTask, counter: EdgeCounter) -> Workers:
        first = part is self._parts[0]
        before = None if first else self._parts[self._parts.index(part) - 1].node
        part.workers = Workers(part.node, on, part.context, counter, before=before, after=after.node)
        return part.workers

    def _admits_to(self, part: _StageTask) -> Ledger | None:
        return self._context.ledger if part is self._parts[0] else None

    # -- afterwards, and meanwhile -----------------------------------------------------------------------------------

    def statistics(self) -> PipelineStatistics:
        """Every stage and every edge now, or as they were left."""
        return PipelineStatistics(
            stages=tuple(part.statistics() for part in self._parts),
            edges=tuple(edge.statistics() for edge in self._edges),
        )

    @property
    def stop_reason(self) -> str:
        """Why the run ended, for people."""
        if self._failure is not None:
            return str(self._failure).partition("\n")[0]
        if self._open_error is not None:
            return f"opening failed: {_line(self._open_error)}".partition("\n")[0]
        if self._stopped_by:
            return f"stopped by {self._stopped_by}"
        if self._ran_dry:
            return END_OF_STREAM
        returned = [part.node.name for part in self._parts if part.state == "returned"]
        return f"{returned[-1]} returned" if returned and self._parts[-1].state == "returned" else "cancelled"

    def nothing_before(self, part: _StageTask) -> bool:
        """Whether every trajectory in flight is in `part` or behind it, channels included."""
        ledger = self._context.ledger
        held = sum(each.unaccounted for each in self._parts[self._parts.index(part) :])
        return ledger.in_flight <= held - ledger.balance().ended["trained"]

    def loss_reason(self, ledger: Ledger) -> str:
        """The reason for which trajectories are lost that are in flight when the run has ended."""
        if not self._ran_dry:
            return RUN_ENDED
        sink = self._parts[-1]
        taken = {part: part.unaccounted for part in self._parts[1:]}
        taken[sink] = max(0, taken[sink] - ledger.balance().ended["trained"])
        taken[self._parts[0]] = max(0, ledger.in_flight - sum(taken.values()))
        names = [part.node.name for part in self._parts if taken[part]]
        return f"{SWALLOWED}{' and '.join(names)}"


def _nothing() -> None:
    """Nothing runs yet, so there is nothing to cancel."""


async def _close_ends(part: _StageTask) -> None:
    """A stage has returned: what it feeds ends, and what feeds it is refused.

    Not where it raised or was cancelled: the stage after it would take that for the end of the stream.
    """
    if part.outbox is not None:
        await part.outbox.close_all()
    if part.before is not None and part.before.outbox is not None:
        await part.before.inbox.aclose()


def _is_only(error: BaseException, kind: type[BaseException]) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return error.split(kind)[1] is None
    return isinstance(error, kind)


def _line(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()
