"""`TRLWorker`: a flow as the rollout worker of TRL's asynchronous GRPO trainer; its `RolloutWorkerProtocol`.

    TRL's main thread                                    the worker's thread
    rollout_buffer.get  ◀── SampleQueue (bounded) ◀── sink ◀── flow, on an event loop of its own
    callback: micro-batch trained, optimizer step done ──▶ Ledger.commit
    update_model_version ──▶ Ledger.step

The ledger belongs to the event loop; the main thread calls into that. The ledger counts steps as TRL counts versions,
so that the lag of a trajectory is the staleness that TRL computes.
"""

from __future__ import annotations

import dataclasses
import itertools
import queue
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from ...._pipeline.accounting.telemetry import get_logger
from ...._pipeline.errors import FlowEnded, InvalidPipeline, MissingInterface
from ...._pipeline.graph.report import Report
from ...._pipeline.graph.statistics import PipelineStatistics
from ...._pipeline.runtime.flow import Flow
from ...._schemas import TrajectoryGroup, TrajectoryId
from ...._schemas.numbers import whole_number
from ...batching.batcher import NOTHING_TO_TRAIN
from ..flow_thread.flow_run import Decode, Drop, FlowRun, Groups
from ..flow_thread.flow_thread import FlowThread, statistics_of
from ..flow_thread.sample_queue import SampleQueue, Trajectories
from ..interface import TRIED, object_in
from .callback import callback_of, note_collated, samples_per_version
from .deliveries import SampleBounds, TRLDeliveries
from .samples import FIELDS, samples_of

log = get_logger("penstock.trl")

UNTRAINED = Drop("filtered", NOTHING_TO_TRAIN)

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
        self._limits: SampleBounds | None = None
        self._per_version: int | None = None
        """Samples that TRL trains for a version of its weights; None if that varies."""
        self._temperature: float | None = None
        self._saved: Mapping[str, Any] | None = None
        self._version = 0
        """The version of the trainer's weights; written by the main thread."""
        self._deliveries = TRLDeliveries()
        self._stepped: list[TrajectoryId] = []
        """Trained by optimizer steps that are not committed yet."""
        self._thread: FlowThread | None = None
        self._queue = SampleQueue(whole_number("capacity", capacity), self._taken)
        self.rollout_buffer: queue.Queue[Any] = self._queue
        """The samples; see TRL's `RolloutWorkerProtocol`."""
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue(METRICS_CAPACITY)
        """Metrics of the flow, one dict for each committed step."""
        self.report: Report | None = None
        """The report of the flow, once training has ended: the balance of the ledger, and why it ended."""

    def __repr__(self) -> str:
        state = "not started" if self._thread is None else "runs" if self._thread.running else "ended"
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
        return statistics_of(self._thread)

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
        items = partial(self._samples, sample, itertools.count())
        run = FlowRun(
            flow,
            items,
            self._queue,
            trainer="TRL",
            rest=UNTRAINED,
            saved=self._saved,
            version=self._version,
            per_step=self._per_version,
        )
        self._thread = FlowThread(run, "penstock-trl-flow")

    def stop(self) -> None:
        """Stop the flow and everything that it started; set `report`. Called by TRL when training has ended."""
        if self._thread is None or not self._thread.running:
            return
        self.commit()
        self.report = self._thread.stop()

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
        if self._thread is None or not self._thread.running:
            raise FlowEnded("TRL waits for samples, and its worker does not run: a worker runs in one train() only")
        self._thread.check(stale_after_s)

    # -- called by the callback and by the queue, in the main thread -------------------------------------------------

    def train_begins(self, args: Any, loader: Any, *, saved: Mapping[str, Any] | None, resumed: bool) -> None:
        """See `Reported`."""
        self.begin(
            SampleBounds(args.max_staleness, args.token_budget or 0),
            temperature=args.temperature,
            per_version=samples_per_version(args),
            saved=saved,
            resumed=resumed,
        )
        note_collated(loader, self.collated)

    def begin(
        self,
        limits: SampleBounds,
        *,
        temperature: float,
        per_version: int | None,
        saved: Mapping[str, Any] | None,
        resumed: bool,
    ) -> None:
        """Note TRL's configuration, and the state of the checkpoint that it resumes."""
        if resumed and saved is None:
            log.warning("resumed_without_ledger", consequence="prompts that were trained may be trained again")
        self._limits, self._temperature, self._saved = limits, temperature, saved
        self._per_version = per_version

    def collated(self, examples: list[Any]) -> None:
        """Note the next micro-batch of TRL, by the `input_ids` of its samples."""
        self._deliveries.collate(examples)

    def trained_microbatch(self) -> None:
        """Note that TRL has trained the earliest micro-batch. Called by the callback."""
        self._deliveries.train()

    def stepped(self) -> None:
        """Note that TRL's optimizer step is done. Called by the callback."""
        self._stepped += self._deliveries.step()

    def step_ends(self, step: int, args: Any) -> None:
        """See `Reported`. Where weights are sent after a step, TRL names their version, and that commits."""
        if step % args.weight_sync_steps:
            self.commit()

    def commit(self) -> None:
        """Commit what TRL's optimizer steps have trained, at its present version."""
        thread = self._thread
        if thread is None:
            return
        stepped, self._stepped = self._stepped, []
        if metrics := thread.call(lambda: thread.run.commit(stepped, self._version)):
            with suppress(queue.Full):
                self.metrics_queue.put_nowait(metrics)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: the trajectories that were trained, and the state of the flow's stages."""
        return {} if self._thread is None else self._thread.call(self._thread.run.state_dict)

    def _samples(
        self, make: Callable[..., Any], numbers: Iterator[int], group: TrajectoryGroup, decode: Decode | None
    ) -> Iterator[tuple[Trajectories, Any]]:
        """Yield the samples of a group, on the event loop."""
        for trajectory, fields in samples_of(group, next(numbers), decode=decode, temperature=self._temperature):
            yield (trajectory,), make(**fields, enqueued_at=time.time())  # TRL measures ages by this clock

    def _taken(self, sample: Any, trajectories: Trajectories) -> None:
        """Note a sample that TRL has taken, and end it if TRL drops it next. Called by the queue."""
        thread, limits = self._thread, self._limits
        assert thread is not None and limits is not None  # noqa: S101, PT018 (the flow sent it)
        thread.run.wake()
        if (dropped := limits.drop(sample, self._version)) is None:
            self._deliveries.take(sample, *trajectories)
        else:
            thread.call(lambda: thread.run.end(trajectories, *dropped))


def rollout_sample() -> Any:
    """Return TRL's class of samples.

    Raises:
        MissingExtra: TRL is not installed.
        MissingInterface: it has no such class, or the class lacks a field.
    """
    found = object_in("trl", "trl.experimental.async_grpo.async_rollout_worker", "RolloutSample")
    fields = {field.name for field in dataclasses.fields(found)}
    if missing := set(FIELDS) - fields:
        raise MissingInterface(
            f"expected RolloutSample to have {sorted(missing)}, found {sorted(fields)}: install trl=={TRIED['trl']}"
        )
    return found
