"""`FlowThread`: the thread of a `FlowRun`, and calls into its event loop."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

from ...._pipeline.graph.report import Report
from ...._pipeline.graph.statistics import PipelineStatistics
from .flow_run import FlowRun
from .sample_queue import SampleQueue

T = TypeVar("T")


class FlowThread:
    """Runs a `FlowRun` in a thread of its own. All methods are called in one other thread."""

    def __init__(self, run: FlowRun, name: str) -> None:
        """Start the flow in a thread called `name`.

        Raises:
            InvalidPipeline: the flow cannot work.
        """
        self.run = run
        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal(name=name))
            self._ended: Future[None]
            self._ended, _ = portal.start_task(run.run)
            self._portal: BlockingPortal | None = portal
            """None once the flow was stopped."""
            self._stack = stack.pop_all()

    @property
    def running(self) -> bool:
        """True if the flow was not stopped. One that failed or ended by itself runs until `stop`."""
        return self._portal is not None

    def call(self, function: Callable[[], T]) -> T:
        """Return the result of `function`, called on the event loop while that runs."""
        return function() if self._portal is None else self._portal.call(function)

    def statistics(self) -> PipelineStatistics:
        """Return what every stage waits for now; once the flow was stopped, that of its end."""
        return self.call(self.run.pipeline.statistics)

    def check(self, stale_after_s: float) -> None:
        """Raise if nothing will come; see `FlowRun.check`."""
        self.run.check(stale_after_s, self.statistics)

    def next(
        self,
        samples: SampleQueue,
        *,
        poll_s: float,
        stale_after_s: float,
        wanted: Callable[[], bool] = lambda: True,
    ) -> Any:
        """Wait for the next item of `samples`, and return it; None once it is not `wanted` any more.

        Looks every `poll_s` seconds whether anything will come.

        Raises:
            Exception: see `check`.
        """
        while wanted():
            try:
                return samples.get(timeout=poll_s)
            except queue.Empty:
                if wanted():
                    self.check(stale_after_s)
        return None

    def stop(self) -> Report | None:
        """Stop the flow and everything that it started; return its report."""
        if self._portal is not None:
            try:
                self._portal.call(self.run.stop)
                self._ended.result()
            finally:
                self._portal = None
                self._stack.close()
        return self.run.pipeline.report


def statistics_of(thread: FlowThread | None) -> PipelineStatistics:
    """Return the statistics of a flow that starts when the trainer begins; None: it has not.

    Raises:
        RuntimeError: it has not started.
    """
    if thread is None:
        raise RuntimeError("expected statistics of a flow that has started, got a call before training began")
    return thread.statistics()
