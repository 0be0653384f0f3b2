"""`TRLWorker`: a flow as the rollout worker of TRL's asynchronous GRPO trainer; its `RolloutWorkerProtocol`.

    TRL's main thread                                    the worker's thread
    rollout_buffer.get  ◀── SampleQueue (bounded) ◀── sink ◀── flow, on an event loop of its own
    callback: micro-batch trained, optimizer step done ──▶ Ledger.commit
    update_model_version ──▶ Ledger.step

The ledger belongs to the event loop; the main thread calls into that. The ledger counts steps as TRL counts versions,
so that the lag of a trajectory is the staleness that TRL computes.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import Any, TypeAlias, TypeVar, cast

import anyio
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus
from anyio.from_thread import BlockingPortal, start_blocking_portal

from ...._pipeline.accounting.committed_prompts import CommittedPrompts
from ...._pipeline.accounting.ledger import Ledger
from ...._pipeline.accounting.telemetry import Metrics, get_logger
from ...._pipeline.channels.channel import ReceiveChannel
from ...._pipeline.durability.resumption import ResumePoint, Stateful
from ...._pipeline.errors import FlowEnded, FlowStalled, InvalidPipeline
from ...._pipeline.graph.context import drop
from ...._pipeline.graph.stage_info import StageInfo, info_of
from ...._pipeline.graph.statistics import PipelineStatistics, Report
from ...._pipeline.runtime.flow import Flow, Pipeline
from ...._pipeline.util.waiting import Waiters
from ...._schemas import TrajectoryGroup, TrajectoryId
from ...._schemas.numbers import whole_number
from ...batcher import NOTHING_TO_TRAIN
from .callback import callback_of
from .deliveries import Deliveries, Limits
from .interface import rollout_sample
from .sample_queue import SampleQueue
from .samples import Decode, samples_of

log = get_logger("penstock.trl")

T = TypeVar("T")

Groups: TypeAlias = Flow[TrajectoryGroup]

CAPACITY = 16
"""Samples that wait for the trainer by default: more only makes them older."""

METRICS_CAPACITY = 256
"""Metrics of steps that wait until TRL logs; further ones are dropped."""


class TRLWorker:
    """Runs a flow for `AsyncGRPOTrainer(rollout_worker=…)`, which gets its groups as samples.

        worker = TRLWorker(flow)
        transfer = TRLTransfer(publisher)
        AsyncGRPOTrainer(…, rollout_worker=worker, weight_transfer=transfer, callbacks=[worker.callback()])

    The flow runs from the start of training to its end, in a thread with an event loop of its own.
    """

    def __init__(self, flow: Groups | Callable[[], Groups], *, capacity: int = CAPACITY) -> None:
        """Prepare; nothing is started before TRL trains.

        Args:
            flow: sends groups with advantages. Or a function that returns it, called when training begins and the
                publisher of `TRLTransfer` is open: a policy can then be given the publisher's URL.
            capacity: samples that may wait for the trainer.

        Raises:
            InvalidConfig: `capacity` is no whole number of at least 1.
        """
        self._flow = flow
        self._limits: Limits | None = None
        self._temperature: float | None = None
        self._saved: Mapping[str, Any] | None = None
        self._version = 0
        """The version of the trainer's weights; written by the main thread."""
        self._deliveries = Deliveries()
        self._stepped: list[TrajectoryId] = []
        """Trained by optimizer steps that are not committed yet."""
        self._late: list[TrajectoryId] = []
        """Trained after the flow had failed."""
        self._run: _FlowRun | None = None
        self._portal: BlockingPortal | None = None
        self._stack = ExitStack()
        self._ended: Future[None] = Future()
        """Done when the flow has ended."""
        self._progress: tuple[int, float] = 0, 0.0
        """Samples that the flow had sent, and when that was first seen."""
        self.rollout_buffer: queue.Queue[Any] = SampleQueue(whole_number("capacity", capacity), self._taken)
        """The samples; see TRL's `RolloutWorkerProtocol`."""
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue(METRICS_CAPACITY)
        """Metrics of the flow, one dict for each committed step."""
        self.report: Report | None = None
        """The report of the flow, once training has ended: the balance of the ledger, and why it ended."""

    def __repr__(self) -> str:
        state = "runs" if self._portal is not None else "ended" if self._run is not None else "not started"
        return f"<TRLWorker: {state}, version {self._version}, {self._deliveries!r}>"

    def callback(self) -> Any:
        """Return the `TrainerCallback` that commits what was trained, for `AsyncGRPOTrainer(callbacks=[…])`.

        Raises:
            MissingExtra: transformers is not installed.
        """
        return callback_of(self)

    def statistics(self) -> PipelineStatistics:
        """Return what every stage of the flow waits for now; that of the end once training has ended.

        Raises:
            RuntimeError: training has not begun.
        """
        if self._run is None:
            raise RuntimeError("expected statistics of a flow that has started, got a call before training began")
        return self._call(self._run.pipeline.statistics)

    # -- RolloutWorkerProtocol, called by TRL in its main thread -----------------------------------------------------

    def start(self) -> None:
        """Start the flow, in a thread. Called by TRL when training begins, after the first weights were sent.

        Raises:
            InvalidPipeline: the trainer lacks the callback, or the flow cannot work.
            MissingExtra: TRL is not installed.
            MissingInterface: TRL lacks an interface.
        """
        if self._limits is None:
            raise InvalidPipeline(
                "TRL: expected AsyncGRPOTrainer(callbacks=[worker.callback()]), got a trainer without: "
                "what it trains could not be committed"
            )
        sample = rollout_sample()
        flow = self._flow if isinstance(self._flow, Flow) else self._flow()
        run = _FlowRun(
            flow,
            sample,
            self.rollout_buffer,
            saved=self._saved,
            temperature=self._temperature,
            version=self._version,
        )
        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal(name="penstock-trl-flow"))
            self._ended, _ = portal.start_task(run.run)
            self._portal, self._run, self._stack = portal, run, stack.pop_all()
        self._progress = 0, time.monotonic()

    def stop(self) -> None:
        """Stop the flow and everything that it started; set `report`. Called by TRL when training has ended."""
        if self._portal is None or self._run is None:
            return
        self.commit()
        try:
            self._portal.call(self._run.stop)
            self._ended.result()
        finally:
            self._portal = None
            self._stack.close()
            self.report = self._run.pipeline.report

    def update_model_version(self, model_version: int) -> None:
        """Commit what was trained since the last version, and let the flow begin what is sampled with this one."""
        self._version = model_version
        self.commit()

    def check_health(self, stale_after_s: float) -> None:
        """Raise if no sample will come; TRL calls this while its queue is empty.

        Raises:
            PenstockError: the error that ended the flow.
            FlowEnded: the flow has sent its last group, or was stopped.
            FlowStalled: it has sent nothing for `stale_after_s`.
        """
        run = self._run
        if run is None or self._portal is None:
            raise FlowEnded("TRL waits for samples, and its worker does not run: a worker runs in one train() only")
        if run.failure is not None:
            raise run.failure
        if run.ended:
            raise FlowEnded(
                f"TRL waits for more samples than the {run.sent} that the flow has sent, which has ended: give it more "
                f"prompts (SourceEnv(groups=None), PromptDataset(epochs=None)), or train fewer steps (max_steps)"
            )
        self._check_progress(run, stale_after_s)

    def _check_progress(self, run: _FlowRun, stale_after_s: float) -> None:
        sent, since = self._progress
        if run.sent != sent:
            self._progress = run.sent, time.monotonic()
        elif (waited_s := time.monotonic() - since) > stale_after_s:
            waits = "; ".join(f"{stage.name}: {stage.waiting_for or 'works'}" for stage in self.statistics().stages)
            raise FlowStalled(f"expected a sample within {stale_after_s:g} s, got none in {waited_s:.0f} s ({waits})")

    # -- called by the callback and by the queue, in the main thread -------------------------------------------------

    def begin(self, limits: Limits, *, temperature: float, saved: Mapping[str, Any] | None, resumed: bool) -> None:
        """Note TRL's configuration, and the state of the checkpoint that it resumes. Called by the callback."""
        if resumed and saved is None:
            log.warning("resumed_without_ledger", consequence="prompts that were trained may be trained again")
        self._limits, self._temperature, self._saved = limits, temperature, saved

    def collated(self, examples: list[Any]) -> None:
        """Note the next micro-batch of TRL, by the `input_ids` of its samples. Called by the callback."""
        self._deliveries.collate(examples)

    def trained_microbatch(self) -> None:
        """Note that TRL has trained the earliest micro-batch. Called by the callback."""
        self._deliveries.train()

    def stepped(self) -> None:
        """Note that TRL's optimizer step is done. Called by the callback."""
        self._stepped += self._deliveries.step()

    def commit(self) -> None:
        """Commit what TRL's optimizer steps have trained, at its present version. Called by the callback."""
        run = self._run
        if run is None:
            return
        stepped, self._stepped = self._stepped, []
        if not self._call(lambda: run.commit(stepped, self._version)):
            self._late += stepped
        with suppress(queue.Full):
            self.metrics_queue.put_nowait(run.emitted)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: the trajectories that were trained, and the state of the flow's stages."""
        run = self._run
        if run is None:
            return {}
        state = self._call(run.state_dict)
        if self._late:
            committed = CommittedPrompts.of_state(state["committed"])
            for trajectory in self._late:
                committed.add(trajectory.group, 1 << trajectory.repetition_id)
            state["committed"] = committed.state_dict()
        return state

    def _taken(self, sample: Any, trajectory: TrajectoryId) -> None:
        """Note a sample that TRL has taken, and end it if TRL drops it next. Called by the queue."""
        run, limits = self._run, self._limits
        assert run is not None and limits is not None  # noqa: S101, PT018 (the flow sent it)
        run.wake()
        if (dropped := limits.drop(sample, self._version)) is None:
            self._deliveries.take(sample, trajectory)
        else:
            self._call(lambda: run.end(trajectory, *dropped))

    def _call(self, function: Callable[[], T]) -> T:
        """Return the result of `function`, called on the event loop while it runs."""
        return function() if self._portal is None else self._portal.call(function)


class _FlowRun:
    """One run of the flow, on the event loop of its thread."""

    def __init__(
        self,
        flow: Groups,
        sample: Any,
        samples: queue.Queue[Any],
        *,
        saved: Mapping[str, Any] | None,
        temperature: float | None,
        version: int,
    ) -> None:
        assert isinstance(samples, SampleQueue)  # noqa: S101 (made by the worker)
        self._sample = sample
        self._samples = samples
        self._temperature = temperature
        self._ledger = Ledger()
        self._metrics = Metrics()
        self._room = Waiters()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._cancel: Callable[[], None] = _nothing
        self._over = False
        """Whether the pipeline has ended: its ledger has counted what was in flight as lost."""
        self._stateful = {
            node.name: node.stage for node in flow.nodes if not node.remote and isinstance(node.stage, Stateful)
        }
        flow = self._resumed(flow, saved, version)
        self._decode = _decoder(flow)
        self.pipeline: Pipeline = flow.sink(_Sink(self))
        self.pipeline.check()
        self.failure: BaseException | None = None
        """The error that ended the flow."""
        self.ended = False
        """Whether the flow has sent its last group."""
        self.sent = 0
        """Samples that were put into the queue."""
        self.emitted: dict[str, float] = {}
        """The metrics of the last committed step."""

    def _resumed(self, flow: Groups, saved: Mapping[str, Any] | None, version: int) -> Groups:
        if not saved:
            self._ledger.step = version
            return flow
        committed = CommittedPrompts.of_state(saved["committed"])
        self._ledger.restore(committed, version)
        for name, stage in self._stateful.items():
            if name in saved["stages"]:
                stage.load_state_dict(saved["stages"][name])
        log.info("flow_resumed", trained=len(committed))
        return flow.resume_from(ResumePoint(version, committed))

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Run the flow until `stop`, or until a stage fails."""
        self._loop = asyncio.get_running_loop()
        try:
            with anyio.CancelScope() as scope:
                self._cancel = scope.cancel
                task_status.started()
                await self.pipeline.run(ledger=self._ledger, metrics=self._metrics)
        except Exception as error:  # noqa: BLE001 (raised in the trainer's thread)
            self.failure = error
        finally:
            self._over = True
            self._samples.close()

    def stop(self) -> None:
        """Cancel the flow."""
        self._cancel()

    async def feed(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        """Put the samples of every group into the queue, each when there is room."""
        numbers = itertools.count()
        async for group in inbox:
            found = list(samples_of(group, next(numbers), decode=self._decode, temperature=self._temperature))
            trains = {trajectory for trajectory, _ in found}
            drop([each for each in group.ids if each not in trains], "filtered", NOTHING_TO_TRAIN)
            del group  # copied: its slot must not wait for the trainer
            for trajectory, fields in found:
                await self._put(self._sample(**fields), trajectory)
        self.ended = True
        self._samples.close()
        await anyio.sleep_forever()  # what was sent is trained meanwhile

    async def _put(self, sample: Any, trajectory: TrajectoryId) -> None:
        while not self._samples.offer(sample, trajectory):
            await self._room.wait()
        self.sent += 1

    def wake(self) -> None:
        """Let the sink look for room. Called in the main thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._room.wake_all)

    def end(self, trajectory: TrajectoryId, state: Any, reason: str) -> None:
        """Count the end of a trajectory that TRL drops; one of a run that is over was counted as lost."""
        if self._ledger.is_open(trajectory):
            self._ledger.end([trajectory], state, reason)

    def commit(self, trained: list[TrajectoryId], version: int) -> bool:
        """Commit trajectories at `version`; return false if the run is over, and has counted them as lost."""
        if self._over:
            return not trained
        self._ledger.commit_ids(trained, version)
        self.emitted = self._metrics.emit(version)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON values."""
        stages = {name: dict(stage.state_dict()) for name, stage in self._stateful.items()}
        return {"committed": self._ledger.committed.state_dict(), "stages": stages}


class _Sink:
    """The end of the flow, which feeds TRL's queue."""

    def __init__(self, run: _FlowRun) -> None:
        self._run = run

    def stage_info(self) -> StageInfo:
        """State the name: it is in metrics and errors."""
        return StageInfo(name="TRL")

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        """Run the sink; see `Sink`."""
        await self._run.feed(inbox)


def _nothing() -> None:
    pass


def _decoder(flow: Groups) -> Decode | None:
    """Return the function that decodes tokens, of the first tokenizer in the flow that has one."""
    for node in flow.nodes:
        for tokenizer in info_of(node.stage).tokenizers or ():
            if (decode := getattr(tokenizer, "decode", None)) is not None:
                return cast("Decode", decode)
    return None
