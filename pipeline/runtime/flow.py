"""Stages joined into a pipeline: `source(…).then(…).sink(…)`, typed so that a chain that does not fit is a type error.

A flow and a pipeline are descriptions, immutable values; `Pipeline.run` runs one any number of times. Capacity and
placement belong to the edge, so they are arguments here and not fields of the stages.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from ..._schemas.choices import check_choice
from ..accounting.ledger import Ledger
from ..accounting.ledger_metrics import report_ledger
from ..accounting.telemetry import Metrics, get_logger
from ..channels.channel import SendChannel
from ..durability.resumption import ResumePoint, resumed, with_checkpoints
from ..durability.run_changes import StageFacts, facts_of
from ..errors import InvalidPipeline
from ..graph.check import in_other_interpreters, interpreter_problems, problems
from ..graph.context import Context, current
from ..graph.describe import drawn
from ..graph.misplaced import ends_in_a_sink, refuse_misplaced_stage, refuse_unknown_placement
from ..graph.placement import HERE, Here, Placement
from ..graph.record_types import record_types, sent_along
from ..graph.report import Report
from ..graph.stage import Sink, Source, Stage
from ..graph.stage_info import StageInfo, info_of, name_of, named
from ..graph.stage_node import StageNode
from ..graph.statistics import PipelineStatistics
from ..trackers.background import require_trackers, tracking
from ..trackers.tracker import RunInfo, Tracker
from ..util.blocking import enter_in_thread, in_thread
from ..util.printing import print_line
from ..util.user_code import call_user
from ..view.watching import View, watching
from ..workers.loop_watch import checked_in_thread
from ..workers.worker_stage import refuse_while_importing_main
from .outcome import check_outcome, stop_message
from .run import Run
from .stop_signals import STOP_TIMEOUT_S, StopRequest, stop_request

log = get_logger("penstock.pipeline")

Out_co = TypeVar("Out_co", covariant=True)
Out = TypeVar("Out")
New = TypeVar("New")


@dataclass(frozen=True, slots=True)
class Flow(Generic[Out_co]):
    """A source and the stages after it, without a sink. Itself a source, so that fragments can be composed."""

    nodes: tuple[StageNode, ...]
    """The stages so far, each with the edge that leads to it."""

    def stage_info(self) -> StageInfo:
        """Return the names of its stages, the records of the last one, and the prompts of the first one."""
        last = sent_along(record_types(node.stage) for node in self.nodes)[-1]
        bounds = (info_of(node.stage).sends_at_most_tokens for node in reversed(self.nodes))
        first = info_of(self.nodes[0].stage)
        return StageInfo(
            name=" → ".join(node.name for node in self.nodes),
            output_type=last if isinstance(last, type) else None,
            sends_at_most_tokens=next((bound for bound in bounds if bound is not None), None),
            assign=first.assign,
            groups_at_once=first.groups_at_once,
            evaluation=first.evaluation,
            needs_tokenizer=any(info_of(node.stage).needs_tokenizer for node in self.nodes),
            nodes=self.nodes,
        )

    def facts(self) -> StageFacts:
        """Return the facts of its stages, by their names; see `StatesFacts`."""
        stated = facts_of(self.nodes)
        return StageFacts(
            fixed={name: facts.fixed for name, facts in stated.items()},
            options={name: facts.options for name, facts in stated.items()},
        )

    def resume_from(self, point: ResumePoint) -> Flow[Out_co]:
        """Return this flow with its stages resumed from `point`."""
        return replace(self, nodes=resumed(self.nodes, point))

    def then(
        self,
        stage: Stage[Out_co, New],
        *,
        on: Placement = HERE,
        capacity: int | None = None,
        capacity_bytes: int | None = None,
    ) -> Flow[New]:
        """Return the flow with `stage` at its end.

        Args:
            stage: receives the records of the flow.
            on: `here()` or `processes(n)`.
            capacity: records that may wait in front of `stage`: 2 by default; between processes 64 for each worker.
            capacity_bytes: bytes that may wait; between processes 64 MiB for each worker, allocated when it starts.

        Raises:
            InvalidPipeline: `stage` is a class, a source or a sink, or `on` is no placement; with the line to write.
        """
        refuse_misplaced_stage("stage", stage)
        refuse_unknown_placement(on)
        return Flow(named((*self.nodes, StageNode(stage, name_of(stage), on, capacity, capacity_bytes))))

    def sink(self, stage: Sink[Out_co], *, capacity: int | None = None, capacity_bytes: int | None = None) -> Pipeline:
        """Return the pipeline that ends in `stage`, placed here; capacities as in `then`.

        Raises:
            InvalidPipeline: `stage` is a class, or no sink; with the line to write.
        """
        refuse_misplaced_stage("sink", stage)
        return Pipeline(named((*self.nodes, StageNode(stage, name_of(stage), HERE, capacity, capacity_bytes))))

    @ends_in_a_sink
    async def run(self, outbox: SendChannel[Out_co], /) -> None:
        """Run the stages, and send the records of the last one to `outbox`: `Source.run` of a flow.

        Raises:
            InvalidPipeline: there is no `outbox`: the call was meant for a pipeline with its sink.
            StageFailed: a stage raised.
        """
        await Run(self.nodes, current(), outbox).run()


def _refuse(found: Sequence[str]) -> None:
    """Refuse a chain with the problems that were found, if any."""
    if len(found) == 1:
        raise InvalidPipeline(f"this pipeline cannot work: {found[0]}")
    if found:
        raise InvalidPipeline("\n".join([f"{len(found)} in this pipeline cannot work:", *found]))


class Pipeline:
    """A chain from a source to a sink: its description, its run, and the statistics of that."""

    def __init__(self, nodes: tuple[StageNode, ...]) -> None:
        self.nodes = nodes
        """The stages, source first, each with the edge that leads to it."""
        self.report: Report | None = None
        """The report of the last run, also of one that was cancelled or failed; None before, and while one runs."""
        self._run: Run | None = None
        """The present run, or the last one."""
        self._running = False

    def __repr__(self) -> str:
        return f"<Pipeline {' → '.join(node.name for node in self.nodes)}>"

    def check(self) -> None:
        """Check the chain for problems, before anything starts. Blocks, where workers have another interpreter.

        Raises:
            InvalidPipeline: with every problem, and its remedy.
        """
        _refuse(problems(self.nodes) or interpreter_problems(in_other_interpreters(self.nodes)))

    def describe(self) -> str:
        """Return the pipeline as text: each stage with its placement, each edge with its capacity."""
        return drawn(self.nodes)

    def statistics(self) -> PipelineStatistics:
        """Return the state and waits of every stage, and the content of every edge: now, or at the last run's end."""
        return self._run.statistics() if self._run is not None else PipelineStatistics(stages=(), edges=())

    async def run(
        self,
        *,
        folder: str | Path | None = None,
        ledger: Ledger | None = None,
        metrics: Metrics | None = None,
        view: View | None = None,
        trackers: Sequence[Tracker] = (),
        config: Mapping[str, Any] | None = None,
        allow_changes: bool = False,
        skip_damaged: bool = False,
        stop_timeout_s: float = STOP_TIMEOUT_S,
    ) -> Report:
        """Run until the sink has returned: when the stream ends, or when it needs no more records.

        However the run ends, cancellation included, `report` is set afterwards.

        SIGTERM, Ctrl-C and SIGHUP stop it gracefully: the sink finishes its present step, SinkTrainer writes a
        checkpoint, and the script ends with exit code 143, 130 or 129. A second SIGTERM or Ctrl-C ends the process at
        once. This holds where the run is in the main thread of a script that does not handle the signal itself.

        Args:
            folder: of the run's checkpoints, of its metrics and samples in `metrics.jsonl` and `samples.jsonl`, and of
                its view for `penstock top`. Where it holds a checkpoint of an earlier run, that run is continued.
            ledger: counts the trajectories, a restored one to continue a run; a new one by default.
            metrics: collects the metrics of stages; give one with sinks to see them.
            view: shows the run on stderr: `live` as a table on the terminal, `lines` as plain lines, `auto` as the
                table where stderr is a terminal, and otherwise as lines. None for no view.
            trackers: given metrics, samples and `config`, each in a thread of its own. One that raises, hangs or lags
                behind is logged, and neither ends nor delays the run.
            config: hyper-parameters, as plain values; written to `config.json` in the folder too. A run that is
                continued prints the values that have changed.
            allow_changes: continue the run in the folder also with other data, or another model.
            skip_damaged: continue from the last checkpoint in `folder` that is whole, and set those after it aside.
            stop_timeout_s: seconds from the first signal to the end of the process; then it is ended by force.

        Raises:
            InvalidPipeline: `check` found something, or the sink keeps no checkpoints for `folder`.
            RunInUse: another process runs in `folder`.
            CheckpointDamaged: a file of the last checkpoint in `folder` is not as it was written.
            RunDiffers: the run in `folder` has other data or another model, and `allow_changes` is false.
            RolloutsFailed: 64 rollouts failed in a row, in all workers together, without a success between them.
            RecordsSwallowed: the run ended by itself, and a stage had neither sent nor dropped some received records.
            NothingTrained: too many trajectories in a row ended without a trained one, no prompt may be sampled, or the
                run ended by itself without training.
            StageFailed: a stage raised; it is named, and `__cause__` is its exception.
            WorkerFailed: a stage raised in a worker (its traceback is in the message), or a worker died too often.
            RunStopped: a signal has stopped the run; alone, or in an exception group. Leave it to end the script.
            RuntimeError: the pipeline is running already.
            InvalidConfig: `view` is none of its values, a tracker is no `Tracker`, or `stop_timeout_s` is not positive.
        """
        if view is not None:
            check_choice("view", view, View)
        require_trackers(trackers)
        refuse_while_importing_main()
        _refuse(call_user(problems, self.nodes))
        if others := in_other_interpreters(self.nodes):
            _refuse(await in_thread(interpreter_problems, others))
        if self._running:
            raise RuntimeError("expected one run at a time, got a second one while the first is running")
        with stop_request(stop_timeout_s) as stop, checked_in_thread("the pipeline's process") as watch:
            context = Context(
                Ledger() if ledger is None else ledger,
                Metrics() if metrics is None else metrics,
                watch_loop=watch.within,
            )
            self._running, self.report = True, None
            try:
                async with AsyncExitStack() as stack:
                    nodes: Sequence[StageNode] = self.nodes
                    if folder is not None:
                        opened = with_checkpoints(
                            Path(folder),
                            nodes,
                            context,
                            config or {},
                            allow_changes=allow_changes,
                            skip_damaged=skip_damaged,
                        )
                        nodes = await enter_in_thread(stack, opened)
                    if trackers:
                        info, stopped = _run_info(folder, context.ledger, config), lambda: stop.by is not None
                        tracked = tracking(trackers, info, context.metrics, context.sample_sinks, stopped)
                        await stack.enter_async_context(tracked)
                    stack.enter_context(report_ledger(context.metrics, context.ledger))
                    run = Run(nodes, context)
                    if view is not None or folder is not None:
                        max_steps = info_of(self.nodes[-1].stage).max_steps
                        written = None if folder is None else Path(folder)
                        watched = watching(
                            view,
                            context,
                            run.statistics,
                            lambda: self.report,
                            max_steps=max_steps,
                            folder=written,
                            config=config or {},
                        )
                        await stack.enter_async_context(watched)
                    self.report = await self._run_once(run, context.ledger, folder, stop)
            finally:
                self._running = False
        if stop.by is not None:  # after the handlers are restored: from here on none is called
            print_line(stop_message(self.report))
            raise await stop.error()
        return self.report

    async def _run_once(self, run: Run, ledger: Ledger, folder: str | Path | None, stop: StopRequest) -> Report:
        self._run = run
        stop.call(run.stop)
        started = time.monotonic()
        try:
            with ledger.on_end(run.check_progress):
                await run.run()
        finally:
            self.report = _report(run, ledger, folder, time.monotonic() - started)
        check_outcome(self.report, ledger, commits=run.commits)
        return self.report


def source(stage: Source[Out], *, on: Placement = HERE, max_lag: int | None = None) -> Flow[Out]:
    """Return a flow that begins with `stage`.

    pipeline = (
        source(SourceEnv(make_env, policy, group_size=8), on=processes(4), max_lag=4)
        .then(AdvantageNormalizer("grpo"))
        .then(Batcher(max_tokens=16_384), capacity=2)
        .sink(SinkTrainer(trainer))
    )
    report = await pipeline.run()

    Args:
        stage: sends records until there are no more. A flow is one: `source(source(A()).then(B()), on=processes(4))`
            runs A and B together in each of four processes.
        on: `here()` or `processes(n)`.
        max_lag: optimizer steps that may lie between the weights that sampled a trajectory and those that it trains.
            `SourceEnv` begins no prompt that would be older when it is trained, and the Batcher drops a group that is,
            as stale. With 0, sampling and training alternate, and a batch is in the order of its ids. None: no bound.

    Raises:
        InvalidPipeline: `stage` is a class, or no source, or `on` is no placement; with the line to write.
        InvalidConfig: `max_lag` is no whole number, or negative.
    """
    refuse_misplaced_stage("source", stage)
    refuse_unknown_placement(on)
    if not isinstance(stage, Flow):
        return Flow(named([StageNode(stage, name_of(stage), on, max_lag=max_lag)]))
    first, *rest = stage.nodes
    bound = first.max_lag if max_lag is None else max_lag
    if isinstance(on, Here):
        return Flow((replace(first, max_lag=bound), *rest))
    return Flow(named([StageNode(stage, name_of(stage), on, max_lag=bound)]))


def _run_info(folder: str | Path | None, ledger: Ledger, config: Mapping[str, Any] | None) -> RunInfo:
    path = None if folder is None else Path(folder)
    name = path.absolute().name if path is not None else "run"
    return RunInfo(name=name, folder=path, step=ledger.step, config=config or {})


def _report(run: Run, ledger: Ledger, folder: str | Path | None, seconds: float) -> Report:
    run.end_in_flight(ledger)
    report = Report(
        stop_reason=run.stop_reason,
        seconds=seconds,
        balance=ledger.balance(),
        in_flight=run.in_flight_at_end,
        steps=ledger.step,
        nothing_learned="" if ledger.constant_steps is None else str(ledger.constant_steps),
        folder="" if folder is None else str(folder),
        checkpoint=ledger.checkpoint,
        statistics=run.statistics(),
    )
    log.info("run_ended", stop_reason=report.stop_reason, in_flight=report.in_flight, ended=report.balance.ended)
    return report
