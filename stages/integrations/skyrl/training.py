"""`SkyRLTraining`: one training by SkyRL, from its side: the flow that runs beside it, its steps and its weights.

The ledger counts steps as SkyRL's weights do: version n is that of n optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from ...._pipeline.accounting.telemetry import get_logger
from ...._pipeline.graph.report import Report
from ...sink.sink_trainer import WeightSink
from ..flow_thread.flow_run import Drop, FlowRun, Groups
from ..flow_thread.flow_thread import FlowThread
from ..flow_thread.weight_transfer import WeightTransfer
from .arrivals import Arrivals
from .failure import GenerationFailure
from .given_rows import GivenRows
from .requests import Requests
from .weights import written

log = get_logger("penstock.skyrl")

NOT_AWAITED = Drop("rejected", "SkyRL does not wait for it")


class SkyRLTraining:
    """Receives the reports of a trainer of SkyRL. Methods that block run in a thread, or where SkyRL blocks too."""

    def __init__(
        self,
        flow: Groups | Callable[[], Groups],
        requests: Requests | Arrivals,
        cfg: Any,
        tokenizer: Any,
        publisher: AbstractAsyncContextManager[WeightSink] | None,
    ) -> None:
        """Prepare; the arguments are those of `PenstockGenerator`, and `requests` get the groups of the flow."""
        self._flow = flow
        self._requests = requests
        self._cfg = cfg
        self._tokenizer = tokenizer
        self._weights = None if publisher is None else WeightTransfer(publisher, "penstock-skyrl-weights")
        self._saved: Mapping[str, Any] | None = None
        self.thread: FlowThread = FlowThread("penstock-skyrl-flow")
        self.rows: GivenRows = GivenRows(self.thread)
        self.failure: GenerationFailure = GenerationFailure()
        self.fully_async: bool = False
        self.version: int = 0
        """Optimizer steps done; also the version of the weights."""
        self.report: Report | None = None
        """The report of the flow, once training has ended."""

    def __repr__(self) -> str:
        return f"{self.thread.state}, version {self.version}"

    def begin(self, *, fully_async: bool) -> None:
        """Open the publisher. Called before the trainer loads a checkpoint. Blocks."""
        self.fully_async = fully_async
        if self._weights is not None:
            self._weights.open()

    def resume(self, saved: Mapping[str, Any] | None) -> None:
        """Note the state of the checkpoint that the trainer resumes."""
        if saved is None:
            log.warning("resumed_without_ledger", consequence="the balance begins with this run")
        self._saved = saved

    def weights_wanted(self, dispatch: Any, version: int) -> None:
        """Publish the weights of the trainer's workers, and commit trained batches; start the flow. Blocks.

        Called before the first step, and after every one.
        """
        if self._weights is not None:
            folder = Path(self._cfg.trainer.export_path) / f"penstock_weights_{version}"
            with written(dispatch, self._tokenizer, folder.absolute()) as tensors:
                self._weights.send(tensors, version)
        self.commit(version)
        if not self.thread.started:
            run = FlowRun(
                self._flow,
                self._requests.awaited,
                self._requests,
                trainer="SkyRL",
                rest=NOT_AWAITED,
                saved=self._saved,
                version=version,
            )
            self.thread.start(run)

    def commit(self, version: int) -> None:
        """Commit the batch of the optimizer step that made the weights of `version`. Blocks."""
        self.version = version
        self.rows.commit(version, keep_rest=self.fully_async)

    def end(self) -> None:
        """Stop the flow and everything that it started, and close the publisher; set `report`. Blocks."""
        try:
            self.report = self.thread.stop()
        finally:
            if self._weights is not None:
                self._weights.close()
