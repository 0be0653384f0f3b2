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

from ...._pipeline.errors import FlowEnded, InvalidPipeline, MissingInterface
from ...._pipeline.graph.report import Report
from ...._pipeline.graph.statistics import PipelineStatistics
from ...._schemas import TrajectoryGroup
from ...._schemas.numbers import whole_number
from ...batching.batcher import NOTHING_TO_TRAIN
from ..flow_thread.deliveries import Deliveries
from ..flow_thread.flow_run import Decode, Drop, FlowRun, Groups
from ..flow_thread.flow_thread import FlowThread
from ..flow_thread.sample_queue import SampleQueue, Trajectories
from ..interface import TRIED, object_in
from .callback import callback_of, note_collated, samples_per_version
from .samples import FIELDS, SampleBounds, samples_of

UNTRAINED = Drop("filtered", NOTHING_TO_TRAIN)

CAPACITY = 16
"""Samples that wait for the trainer by default: more only makes them older."""

METRICS_CAPACITY = 256
"""Metrics of steps that wait until TRL logs; further ones are dropped."""


class TRLWorker:
    """Runs a flow for `AsyncGRPOTrainer(rollout_worker=…)`, and hands over its groups as samples.

        worker = TRLWorker(flow)
        transfer = TRLTransfer(publisher)
        AsyncGRPOTrainer(…, rollout_worker=worker, weight_transfer=transfer, callbacks=[worker.callback()])

    The flow runs from the start of training to its end, in a thread with an event loop of its own.
    """

    def __init__(self, flow: Groups | Callable[[], Groups], *, capacity: int = CAPACITY) -> None:
        """Prepare; the flow starts when TRL trains.

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
        self.deliveries: Deliveries[int, Any] = Deliveries()
        """By the identity of a sample's `input_ids`: TRL passes them on untouched; held, so that no other gets it.

        Batches are TRL's micro-batches. accelerate collates one ahead, so the oldest is in training.
        """
        self._thread = FlowThread("penstock-trl-flow")
        self._queue = SampleQueue(whole_number("capacity", capacity), self._taken)
        self.rollout_buffer: queue.Queue[Any] = self._queue
        """The samples; see TRL's `RolloutWorkerProtocol`."""
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue(METRICS_CAPACITY)
        """Metrics of the flow, one dict for each committed step."""
        self.report: Report | None = None
        """The report of the flow, once training has ended: the balance of the ledger, and why it ended."""

    def __repr__(self) -> str:
        return f"<TRLWorker: {self._thread.state}, version {self._version}, {self.deliveries!r}>"

    def callback(self) -> Any:
        """Return the `TrainerCallback` that commits trained groups, for `AsyncGRPOTrainer(callbacks=[…])`.

        Raises:
            MissingExtra: transformers is not installed.
        """
        return callback_of(self)

    def statistics(self) -> PipelineStatistics:
        """Return the waits of every stage of the flow now; those of its end once training has ended.

        Raises:
            RuntimeError: training has not begun.
        """
        return self._thread.statistics()

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
        run = FlowRun(
            self._flow,
            partial(self._samples, rollout_sample(), itertools.count()),
            self._queue,
            trainer="TRL",
            rest=UNTRAINED,
            saved=self._saved,
            version=self._version,
            per_step=self._per_version,
        )
        self._thread.start(run)

    def stop(self) -> None:
        """Stop the flow and everything that it started; set `report`. Called by TRL when training has ended."""
        if self._thread.running:
            self.commit()
            self.report = self._thread.stop()

    def update_model_version(self, model_version: int) -> None:
        """Commit trajectories trained since the last version, and let the flow begin those to sample with this one."""
        self._version = model_version
        self.commit()

    def check_health(self, stale_after_s: float) -> None:
        """Raise if no sample will come; TRL calls this while its queue is empty.

        Raises:
            PenstockError: the error that ended the flow.
            FlowEnded: the flow has sent its last group, or was stopped.
            FlowStalled: it has sent no group for `stale_after_s`.
        """
        if not self._thread.running:
            raise FlowEnded("TRL waits for samples, and its worker does not run: a worker runs in one train() only")
        self._thread.check(stale_after_s)

    # -- called by the callback and by the queue, in the main thread -------------------------------------------------

    def train_begins(self, args: Any, loader: Any, saved: Mapping[str, Any] | None) -> None:
        """See `TrainedByTRL`."""
        self._limits = SampleBounds(args.max_staleness, args.token_budget or 0)
        self._temperature, self._per_version, self._saved = args.temperature, samples_per_version(args), saved
        note_collated(loader, lambda examples: self.deliveries.batch(map(id, examples)))

    def step_ends(self, step: int, args: Any) -> None:
        """See `TrainedByTRL`. Where weights are sent after a step, TRL names their version, and that commits."""
        if step % args.weight_sync_steps:
            self.commit()

    def commit(self) -> None:
        """Commit the samples of TRL's optimizer steps, at its present version."""
        if metrics := self._thread.commit(self.deliveries.stepped(), self._version):
            with suppress(queue.Full):
                self.metrics_queue.put_nowait(metrics)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the trajectories that were trained, and the state of the flow's stages."""
        return self._thread.state_dict()

    def _samples(
        self, make: Callable[..., Any], numbers: Iterator[int], group: TrajectoryGroup, decode: Decode | None
    ) -> Iterator[tuple[Trajectories, Any]]:
        """Yield the samples of a group, on the event loop."""
        for trajectory, fields in samples_of(group, next(numbers), decode=decode, temperature=self._temperature):
            yield (trajectory,), make(**fields, enqueued_at=time.time())  # TRL measures ages by this clock

    def _taken(self, sample: Any, trajectories: Trajectories) -> None:
        """Note a sample that TRL has taken, and end it if TRL drops it next. Called by the queue."""
        assert self._limits is not None  # noqa: S101 (the flow sent it)
        self._thread.run.wake()
        if (dropped := self._limits.drop(sample, self._version)) is None:
            self.deliveries.give(id(sample.input_ids), trajectories, sample.input_ids)
        else:
            self._thread.end(trajectories, dropped)


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
