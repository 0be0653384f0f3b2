"""`FlowThread`: the thread of a `FlowRun`, and calls into its event loop."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, Literal, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

from ...._pipeline.graph.report import Report
from ...._pipeline.graph.statistics import PipelineStatistics
from ...._schemas import TrajectoryId
from .flow_run import Drop, FlowRun
from .sample_queue import SampleQueue, Trajectories

T = TypeVar("T")

POLL_S = 1.0
"""Seconds between looks at the flow's health, and at whether its next item is wanted, while a trainer waits."""


class FlowThread:
    """Runs a `FlowRun` in a thread of its own, from `start` to `stop`. All methods are called in other threads."""

    def __init__(self, name: str) -> None:
        """Prepare a thread called `name`."""
        self._name = name
        self._run: FlowRun | None = None
        self._ended: Future[None]
        self._portal: BlockingPortal | None = None
        """None before the start, and after the stop."""
        self._stack = ExitStack()

    @property
    def run(self) -> FlowRun:
        """The run.

        Raises:
            RuntimeError: it has not started.
        """
        if self._run is None:
            raise RuntimeError("expected a flow that has started, got a call before training began")
        return self._run

    @property
    def state(self) -> Literal["not started", "runs", "ended"]:
        """The state; a flow that failed or ended by itself runs until `stop`."""
        return "runs" if self.running else "not started" if self._run is None else "ended"

    @property
    def started(self) -> bool:
        """True if the flow was started, also once it was stopped."""
        return self._run is not None

    @property
    def running(self) -> bool:
        """True if the flow was started and not stopped."""
        return self._portal is not None

    def start(self, run: FlowRun) -> None:
        """Start the thread."""
        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal(name=self._name))
            self._ended, _ = portal.start_task(run.run)
            self._run, self._portal = run, portal
            self._stack = stack.pop_all()

    def call(self, function: Callable[[], T]) -> T:
        """Return the result of `function`, called on the event loop while that runs."""
        return function() if self._portal is None else self._portal.call(function)

    def commit(self, trained: list[TrajectoryId], version: int) -> dict[str, float]:
        """Commit trajectories at `version`; return the metrics since the last commit, {} before the start."""
        return self.call(lambda: self.run.commit(trained, version)) if self.started else {}

    def end(self, trajectories: Trajectories, drop: Drop) -> None:
        """Count the end of trajectories that the trainer drops."""
        self.call(lambda: self.run.end(trajectories, drop))

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the trajectories that were trained, and the state of the flow's stages."""
        return self.call(self.run.state_dict) if self.started else {}

    def statistics(self) -> PipelineStatistics:
        """Return the waits of every stage now; once the flow was stopped, those of its end.

        Raises:
            RuntimeError: it has not started.
        """
        return self.call(self.run.pipeline.statistics)

    def check(self, stale_after_s: float, began: float = 0.0) -> None:
        """Raise if no group will come; see `FlowRun.check`."""
        self.run.check(stale_after_s, self.statistics, began)

    def next(self, samples: SampleQueue, *, stale_after_s: float, wanted: Callable[[], bool] = lambda: True) -> Any:
        """Wait for the next item of `samples`, and return it; None once it is not `wanted`.

        Raises:
            Exception: see `check`.
        """
        while wanted():
            try:
                item = samples.get(timeout=POLL_S)
            except queue.Empty:
                if wanted():
                    self.check(stale_after_s)
            else:
                self.run.wake()
                return item
        return None

    def stop(self) -> Report | None:
        """Stop the flow and everything that it started; return its report, None if it was never started."""
        if self._portal is not None:
            try:
                self._portal.call(self.run.stop)
                self._ended.result()
            finally:
                self._portal = None
                self._stack.close()
        return None if self._run is None else self._run.pipeline.report
