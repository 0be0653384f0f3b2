"""Run a chain of stages once: open its channels, run its stages as tasks of one group, and end all of them together.

The end of one stage determines the end of the others:

1. It returned: its outgoing stream ends when all of it is received, and the stages before it are cancelled, because
   their records would not be received.
2. It raised: the stages before the sink are cancelled, and the run raises `StageFailed`. A sink that writes checkpoints
   finishes its present step and writes one first, if this run has done any; any other sink is cancelled.
3. The run was cancelled: all stages are cancelled, without a failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from itertools import pairwise
from typing import Any

import anyio

from ..accounting.end_states import EndState
from ..accounting.ledger import Ledger
from ..accounting.progress_guard import ProgressGuard
from ..accounting.telemetry import get_logger, report_waits
from ..channels.channel import SendChannel
from ..channels.memory import memory_channel
from ..errors import NothingTrained, PeerClosed, RolloutsFailed, StageFailed
from ..graph.context import Context, entered
from ..graph.edge import CountingSendChannel, Edge, EdgeCounter, StoppableReceiveChannel
from ..graph.placement import Here, Joining, Remote
from ..graph.schedule import Schedule
from ..graph.stage_info import info_of, stated_tokenizers
from ..graph.stage_node import StageNode
from ..graph.statistics import PipelineStatistics, StageState, StageStatistics
from ..util.exception_groups import all_of, single_exception, unwrap_single
from ..util.user_code import await_user, raised_text
from ..workers.worker_accounting import RUN_ENDED, RUN_FAILED
from ..workers.workers import Workers
from .outcome import END_OF_STREAM

log = get_logger("penstock.pipeline")

SAVE_TIMEOUT_S = 600.0
"""Seconds that a sink may take for its present step and its checkpoint once another stage has failed."""


class _Forwarder:
    """The last stage of a fragment that ends in processes: sends their records to the channel outside."""

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
            assignments=context.assignments,
            schedule=run.schedule,
            all_wait=lambda: run.all_wait_after(self),
            tokenizer=run.tokenizer,
            evaluation=run.evaluation,
            flush=context.flush,
            sample_sinks=context.sample_sinks,
            watch_loop=context.watch_loop,
            nothing_on_the_way=lambda: run.nothing_before(self),
        )
        """A context of its own, to count the trajectories that the stage drops."""
        self.state: StageState = "not started"
        self.scope = anyio.CancelScope()
        self.before: Edge | None = None
        """The edge that it receives from; None for a source."""
        self.after: Edge | None = None
        """The edge that it sends to; None for a sink."""
        self.outbox: CountingSendChannel[Any] | None = None
        self.workers: Workers | None = None
        """Its processes, where it does not run here."""

    @property
    def over(self) -> bool:
        """Return whether it has ended, so that it receives no more."""
        return self.state not in {"not started", "running"}

    @property
    def stream_ended(self) -> bool:
        """Return whether it returned, or was cancelled after it had closed its end, when the sink returned."""
        waited = self.state == "cancelled" and self.outbox is not None and self.outbox.all_closed
        return self.state == "returned" or waited

    def statistics(self) -> StageStatistics:
        """Return its state now."""
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
        """Return the seconds that it has waited in all, for records and for credit; its workers added up."""
        if self.workers is not None:
            return self.workers.waited
        records = self.before.inbox.statistics().waited_s if self.before else 0.0
        return records, self.outbox.waits[1] if self.outbox else 0.0

    def _waiting_for(self) -> str:
        workers = self.workers.statistics() if self.workers else ()
        if isinstance(self.node.on, Joining) and not workers:
            return f"workers to join at {self.node.on.url}"
        starting = [worker.name for worker in workers if worker.state == "starting"]
        if starting:
            return f"start of {', '.join(starting)}"
        evaluations = self.context.metrics.evaluations
        if self.before is not None and self.outbox is None and evaluations.awaited:
            return evaluations.awaited
        if self.before is not None and self.before.starved:
            return f"records from {self.before.upstream}"
        if self.after is not None and self.after.congested:
            return f"credit from {self.after.downstream}"
        return "" if self.before is not None else evaluations.going_on

    @property
    def waits(self) -> bool:
        """Return whether it only waits for records."""
        # There are four cases:
        #
        # 1. A sink: one that states how many it waits for takes records ahead of the steps that train them.
        # 2. Workers: they hold groups while they work on them.
        # 3. A stage that holds records back until more come; see `FlushableInbox`.
        # 4. Another one: what it has is worked on, also while it receives the next.
        if self.before is None or not self.before.starved:
            return False
        if self.outbox is None:
            return info_of(self.node.stage).waits_for is None
        if self.workers is not None:
            return not self.workers.groups_held
        return any(holds() for holds in self.context.holding) or not self.unaccounted

    @property
    def unaccounted(self) -> int:
        """Trajectories that it received, and neither sent nor dropped."""
        received = self.before.counter.trajectories if self.before else 0
        sent = self.after.counter.trajectories if self.after else 0
        return max(0, received - sent - self.context.dropped.total())


class Run:
    """A chain of stages while it runs, and its statistics afterwards."""

    def __init__(self, nodes: Sequence[StageNode], context: Context, outbox: SendChannel[Any] | None = None) -> None:
        if outbox is not None and nodes[-1].remote:
            nodes = [*nodes, StageNode(_Forwarder(), "outlet", Here())]
        self._context = context
        self._resumed_at = context.ledger.step
        """The last optimizer step of the run that this one resumes."""
        self._outbox = outbox
        """The channel that the last stage sends to, in a fragment without a sink."""
        self.evaluation = info_of(nodes[0].stage).evaluation
        self.tokenizer = next(stated_tokenizers(node.stage for node in nodes), context.tokenizer)
        per_step = _per_step(nodes)
        bound = nodes[0].max_lag
        around = context.schedule
        self.schedule = Schedule(around.max_lag if bound is None else bound, per_step or around.per_step)
        self._tasks = [_StageTask(node, context, self) for node in nodes]
        self._edges: list[Edge] = []
        self._failure: StageFailed | RolloutsFailed | NothingTrained | None = None
        self._guard = ProgressGuard(context.ledger, per_step=per_step, delivered=self._delivered)
        if per_step:
            context.ledger.pace.expected = per_step
        self._open_error: Exception | None = None
        """The exception that opening the channels raised."""
        self._scope = anyio.CancelScope()
        """The scope of the stages."""
        self._opening = anyio.CancelScope()
        """The scope of the opening channels."""
        self._stopped_by = ""
        """The signal that stopped the run; empty without one."""
        self._inbox: StoppableReceiveChannel[Any] | None = None
        """The channel that the sink receives from."""
        self._stream_ended = False
        """True when every stage has returned by itself and the channels between them were empty."""
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
                    await self._open_edges(channels)
            except Exception as error:
                self._open_error = error
                raise
            if self._opening.cancel_called:
                return
            channels.enter_context(self._context.ledger.on_end(self._context.flush.check))
            channels.callback(self._finish)  # while the channels are still open
            with unwrap_single(), self._scope:
                async with anyio.create_task_group() as group:
                    for task in self._tasks:
                        group.start_soon(self._supervise, task, name=task.node.name)
        if self._failure is not None:
            raise self._failure

    def stop(self, by: str) -> None:
        """End the run gracefully: the sink's stream ends, and every stage before it is cancelled.

        Args:
            by: the name of the signal, for the report.
        """
        self._stopped_by = by
        if self._inbox is None:
            self._opening.cancel()
            return
        self._end_before_sink(self._inbox)

    async def _supervise(self, task: _StageTask) -> None:
        """Run one stage, and then end or cancel the stages that its end concerns."""
        task.state = "running"
        try:
            with task.scope, entered(task.context), self._reporting_waits(task), self._expecting_evaluations(task):
                await await_user(self._body, task)
                task.state = "returned"
        except Exception as error:  # noqa: BLE001 (every exception of a stage is reported with its name)
            self._record_failure(task, error)
        finally:
            if task.state == "running":
                task.state = "cancelled"
        if task.state == "returned":
            self._release_upstream(task)
            await _close_ends(task)

    def _reporting_waits(self, task: _StageTask) -> AbstractContextManager[None]:
        if task.workers is not None:
            return nullcontext()
        return report_waits(self._context.metrics, task.node.name, task.waited)

    def _expecting_evaluations(self, task: _StageTask) -> AbstractContextManager[None]:
        if task is not self._tasks[0]:
            return nullcontext()
        return self._context.metrics.evaluations.expected(self._context.ledger.step)

    async def _body(self, task: _StageTask) -> None:
        if task.workers is not None:
            await task.workers.run(task.before.inbox if task.before else None)
        elif task.before is None:
            await task.node.stage.run(task.outbox)
        elif task.outbox is None:
            await task.node.stage.run(self._inbox)
        else:
            await task.node.stage.run(task.before.inbox, task.outbox)

    def check_progress(self) -> None:
        """End the run if it makes no progress; called after trajectories have ended."""
        if self._failure is not None:
            return
        try:
            self._guard.check()
        except (RolloutsFailed, NothingTrained) as error:
            self._failure = error
            self._end_failed()

    def _delivered(self) -> int:
        """Return the number of records that the sink has received; 0 if it commits what it trains."""
        return 0 if self.commits or not self._edges else self._edges[-1].inbox.statistics().received

    @property
    def commits(self) -> bool:
        """True if the sink states that it commits what it trains."""
        return info_of(self._tasks[-1].node.stage).commits

    def _record_failure(self, task: _StageTask, error: Exception) -> None:
        later = self._tasks[self._tasks.index(task) + 1 :]
        if all_of(error, PeerClosed) and any(each.over for each in later):
            return  # it need not send
        task.state = "failed"
        cause = single_exception(error)
        if self._stopped_by and task is not self._tasks[-1]:
            log.warning("stage_failed_while_stopping", stage=task.node.name, error=raised_text(cause))
            return
        failure = (
            cause if isinstance(cause, StageFailed) else StageFailed(f"{task.node.name} raised {raised_text(cause)}")
        )
        if failure is not cause:
            failure.__cause__ = cause
        if self._failure is None:
            self._failure = failure
        else:
            self._failure.add_note(f"besides: {failure}")
            log.warning("stage_failed_too", stage=task.node.name, error=raised_text(cause))
        self._end_failed()

    def _end_failed(self) -> None:
        """End all stages after a failure: a sink that has steps to save by the end of its stream, others at once."""
        sink = self._tasks[-1]
        saves = not sink.over and info_of(sink.node.stage).saves_at_end and self._context.ledger.step > self._resumed_at
        if self._inbox is None or not saves:
            self._scope.cancel()
            return
        self._scope.deadline = min(self._scope.deadline, anyio.current_time() + SAVE_TIMEOUT_S)
        self._end_before_sink(self._inbox)

    def _end_before_sink(self, inbox: StoppableReceiveChannel[Any]) -> None:
        """Cancel every stage before the sink, whose stream `inbox` ends."""
        inbox.end()
        for task in self._tasks[:-1]:
            task.scope.cancel()

    def _release_upstream(self, task: _StageTask) -> None:
        """Cancel the stages before `task`, which has returned; one that has closed its end runs until the sink returns.

        After that it may run on if it has registered a call (`Context.on_sink_returned`).
        """
        for earlier in self._tasks[: self._tasks.index(task)]:
            closed = earlier.outbox is not None and earlier.outbox.all_closed
            if task is self._tasks[-1] and closed and earlier.context.on_sink_returned:
                earlier.context.on_sink_returned.notify()
            elif task is self._tasks[-1] or not closed:
                earlier.scope.cancel()

    def _finish(self) -> None:
        """Record the state at the end of all stages, and count the end of the trajectories that workers still hold."""
        channels = [edge.inbox.statistics() for edge in self._edges]
        empty = all(channel.sent == channel.received for channel in channels)
        self._stream_ended = empty and all(task.stream_ended for task in self._tasks)
        self.in_flight_at_end = self._context.ledger.balance().in_flight
        for task in self._tasks:
            if task.workers is not None:
                task.workers.close(*self._end_of_rest)

    # -- channels ----------------------------------------------------------------------------------------------------

    async def _open_edges(self, channels: AsyncExitStack) -> None:
        """Open the channels between the stages."""
        for before, after in pairwise(self._tasks):
            edge = await self._open(before, after, channels)
            before.after = after.before = edge
            before.outbox = edge.outbox
            self._edges.append(edge)
        if self._outbox is None:
            self._inbox = StoppableReceiveChannel(self._edges[-1].inbox)
        else:
            last = self._tasks[-1]
            counter = EdgeCounter(self._admits_to(last), leaves=self._context.ledger)
            last.outbox = CountingSendChannel(self._outbox.clone(), counter)
            channels.push_async_callback(last.outbox.close_all)

    async def _open(self, before: _StageTask, after: _StageTask, channels: AsyncExitStack) -> Edge:
        counter = EdgeCounter(self._admits_to(before))
        if not isinstance(before.node.on, Here):
            inbox = await channels.enter_async_context(
                self._create_workers(before, before.node.on, after, counter).serve()
            )
            return Edge(before.node.name, after.node.name, inbox, counter, None)
        capacity = 1 if after.node.remote else after.node.memory_capacity
        sender, receiver = memory_channel[Any](capacity, after.node.capacity_bytes)
        channels.callback(receiver.close)
        outbox = CountingSendChannel(sender, counter)
        channels.push_async_callback(outbox.close_all)
        return Edge(before.node.name, after.node.name, receiver, counter, outbox)

    def _create_workers(self, task: _StageTask, on: Remote, after: _StageTask, counter: EdgeCounter) -> Workers:
        first = task is self._tasks[0]
        before = None if first else self._tasks[self._tasks.index(task) - 1].node
        task.workers = Workers(task.node, on, task.context, counter, before=before, after=after.node)
        return task.workers

    def _admits_to(self, task: _StageTask) -> Ledger | None:
        return self._context.ledger if task is self._tasks[0] else None

    # -- statistics, during the run and afterwards -------------------------------------------------------------------

    def statistics(self) -> PipelineStatistics:
        """Return the state of every stage and every edge: now, or at the end of the run."""
        return PipelineStatistics(
            stages=tuple(task.statistics() for task in self._tasks),
            edges=tuple(edge.statistics() for edge in self._edges),
        )

    @property
    def stop_reason(self) -> str:
        """The reason why the run ended, for the report."""
        if self._failure is not None:
            return str(self._failure).partition("\n")[0]
        if self._open_error is not None:
            return f"opening failed: {raised_text(self._open_error)}".partition("\n")[0]
        if self._stopped_by:
            return f"stopped by {self._stopped_by}"
        if self._stream_ended:
            return END_OF_STREAM
        returned = [task.node.name for task in self._tasks if task.state == "returned"]
        return f"{returned[-1]} returned" if returned and self._tasks[-1].state == "returned" else "cancelled"

    def nothing_before(self, task: _StageTask) -> bool:
        """Return whether every trajectory in flight is in `task` or downstream of it, channels included."""
        ledger = self._context.ledger
        held = sum(each.unaccounted for each in self._tasks[self._tasks.index(task) :])
        return ledger.in_flight <= held - ledger.balance().ended["trained"]

    def all_wait_after(self, task: _StageTask) -> bool:
        """Return whether every stage after `task` waits for records: then none is on its way."""
        return all(after.waits for after in self._tasks[self._tasks.index(task) + 1 :])

    @property
    def _end_of_rest(self) -> tuple[EndState, str]:
        """Return the end state of trajectories in flight at the end of the run, and its reason: lost if it failed."""
        return ("unfinished", RUN_ENDED) if self._failure is None else ("lost", RUN_FAILED)

    def end_in_flight(self, ledger: Ledger) -> None:
        """Count the end of the trajectories that are in flight when the run has ended."""
        if not self._stream_ended:
            ledger.end_all(*self._end_of_rest)
            return
        sink = self._tasks[-1]
        taken = {task: task.unaccounted for task in self._tasks[1:]}
        taken[sink] = max(0, taken[sink] - ledger.balance().ended["trained"])
        taken[self._tasks[0]] = max(0, ledger.in_flight - sum(taken.values()))
        names = " and ".join(task.node.name for task in self._tasks if taken[task])
        if lost := ledger.end_all("lost", f"swallowed by {names}"):
            ledger.unaccounted[names] += lost


def _per_step(nodes: Sequence[StageNode]) -> int:
    """Return the trajectories of an optimizer step, where a stage states how many it waits for; else 0."""
    return max((info_of(node.stage).waits_for or 0 for node in nodes), default=0)


async def _close_ends(task: _StageTask) -> None:
    """Close the ends of a stage that has returned: its outgoing stream ends, and senders to it are refused.

    Not called where it raised or was cancelled: the stage after it would take that for the end of the stream.
    """
    if task.outbox is not None:
        await task.outbox.close_all()
    if task.before is not None and task.before.outbox is not None:
        await task.before.inbox.aclose()
