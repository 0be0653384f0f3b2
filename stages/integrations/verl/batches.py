"""`DataProtoBatches`: groups of a flow, such as those of a gateway, as batches for a loop of verl's older kind.

The loop takes a batch, trains, and updates weights; its groups are committed when the weights are updated. A gateway
returns batches that were not committed to the next client.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

from ...._pipeline.graph.report import Report
from ...._pipeline.graph.statistics import PipelineStatistics
from ...._schemas import TrajectoryGroup, TrajectoryId
from ...._schemas.numbers import whole_number
from ...batching.batcher import NOTHING_TO_TRAIN
from ...sink.sink_trainer import WeightSink
from ..flow_thread.flow_run import Decode, Drop, FlowRun, Groups
from ..flow_thread.flow_thread import FlowThread
from ..flow_thread.sample_queue import SampleQueue, Trajectories
from ..flow_thread.weight_transfer import WeightTransfer
from ..interface import object_in
from .data_proto import Shape, padded, unpadded
from .manager import STALE_AFTER_S
from .rows import Needs, Row, rows_of


class DataProtoBatches:
    """Polls a flow for batches, within a `with` block.

    with DataProtoBatches(source(AtroposClient(…)), sequences=64, prompt_length=512, response_length=1024) as polled:
        for _ in range(steps):
            train(polled.next())
            with polled.updating_weights():
                rollout.update_weights(…)
    """

    def __init__(
        self,
        flow: Groups,
        *,
        sequences: int,
        prompt_length: int,
        response_length: int,
        pad_token_id: int = 0,
        publisher: AbstractAsyncContextManager[WeightSink] | None = None,
        saved: Mapping[str, Any] | None = None,
        step: int = 0,
    ) -> None:
        """Prepare; the flow starts with the `with` block.

        Args:
            flow: sends groups. Their advantages, if they have some, are in the batches.
            sequences: of a batch, at least: a batch has whole groups.
            prompt_length: tokens of a padded prompt.
            response_length: tokens of a padded response. Longer sequences are not cut; they are counted as `rejected`.
            pad_token_id: the token that pads.
            publisher: of weights, for samplers of penstock.
            saved: the `state_dict` of an earlier run, to resume.
            step: of the weights: updates before this run.

        Raises:
            InvalidConfig: a number is no whole number in its range.
        """
        self._sequences = whole_number("sequences", sequences)
        self._shape = Shape(
            whole_number("prompt_length", prompt_length),
            whole_number("response_length", response_length),
            whole_number("pad_token_id", pad_token_id, least=0),
        )
        self._flow = flow
        self._transfer = None if publisher is None else WeightTransfer(publisher, "penstock-verl-weights")
        self._saved = saved
        self._step = whole_number("step", step, least=0)
        self._queue = SampleQueue()
        self._thread = FlowThread("penstock-verl-flow")
        self._stack = ExitStack()
        self._untrained: list[TrajectoryId] = []
        """Taken since the last update of weights."""
        self.report: Report | None = None
        """The report of the flow, after the body."""

    def __repr__(self) -> str:
        return f"<DataProtoBatches: step {self._step}, {len(self._untrained)} trajectories taken>"

    def __enter__(self) -> Self:
        """Start the flow in a thread, and open the publisher.

        Raises:
            InvalidPipeline: the flow cannot work.
            MissingExtra: verl is not installed.
            MissingInterface: verl lacks an interface.
        """
        object_in("verl", "verl.protocol", "DataProto")
        with ExitStack() as stack:
            if self._transfer is not None:
                self._transfer.open()
                stack.callback(self._transfer.close)
            run = FlowRun(
                self._flow,
                self._items,
                self._queue,
                trainer="verl",
                rest=Drop("filtered", NOTHING_TO_TRAIN),
                saved=self._saved,
                version=self._step,
            )
            self._thread.start(run)
            stack.callback(self._stop)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop the flow and everything that it started, and close the publisher; set `report`."""
        self._stack.close()

    def next(self) -> Any:
        """Return the next groups, as a `DataProto` of at least `sequences` rows. Blocks.

        Raises:
            PenstockError: the error that ended the flow.
            FlowEnded: the flow has sent its last group, or the `with` block was left.
            FlowStalled: it has sent no group for 30 minutes.
        """
        rows: list[Row] = []
        while len(rows) < self._sequences:
            rows += self._running().next(self._queue, stale_after_s=STALE_AFTER_S)
        self._untrained += [row.trajectory for row in rows]
        from_numpy = object_in("verl", "torch", "from_numpy")
        columns = {name: from_numpy(column.copy()) for name, column in padded(rows, self._shape).items()}
        tokens = [row.tag["seq_len"] for row in rows]
        data: Any = object_in("verl", "verl.protocol", "DataProto").from_dict(
            tensors=columns, non_tensors=unpadded(rows), meta_info={"global_token_num": tokens}
        )
        return data

    @contextmanager
    def updating_weights(self) -> Generator[Callable[[Iterable[tuple[str, Any]]], None]]:
        """Update weights within the body; groups taken before are then committed, as trained by one step.

        Yields a function that publishes tensors by name, if there is a publisher. Commits only if the body succeeds.

        Raises:
            RuntimeError: tensors are published, and there is no publisher.
            WeightsMismatch: the publisher was made for others.
        """
        thread, step = self._running(), self._step + 1

        def publish(weights: Iterable[tuple[str, Any]]) -> None:
            if self._transfer is None:
                raise RuntimeError("expected DataProtoBatches(…, publisher=…) where weights are published, got none")
            self._transfer.send({name: tensor.detach().cpu() for name, tensor in weights}, step)

        yield publish
        self._step = step
        trained, self._untrained = self._untrained, []
        thread.commit(trained, step)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the trajectories that were trained, and the state of the flow's stages."""
        return self._running().state_dict()

    def statistics(self) -> PipelineStatistics:
        """Return the waits of every stage of the flow now."""
        return self._running().statistics()

    # -- on the event loop ---------------------------------------------------------------------------------------------

    def _items(self, group: TrajectoryGroup, _: Decode | None) -> Iterator[tuple[Trajectories, Any]]:
        needs = Needs(logprobs=False, advantages=group.advantages is not None)
        rows = rows_of(group, needs)
        if fitting := [row for row in rows if self._shape.fits(row)]:
            yield tuple(row.trajectory for row in fitting), fitting
        if longer := tuple(row.trajectory for row in rows if not self._shape.fits(row)):
            bounds = f"prompt_length={self._shape.prompt_length}, response_length={self._shape.response_length}"
            yield longer, Drop("rejected", f"longer than {bounds}")

    # -- in the thread of the training ---------------------------------------------------------------------------------

    def _running(self) -> FlowThread:
        if not self._thread.running:
            raise RuntimeError("expected a call within the body of `with DataProtoBatches(…)`")
        return self._thread

    def _stop(self) -> None:
        self.report = self._thread.stop()
