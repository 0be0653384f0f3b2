"""Call a tracker in a thread of its own: one that raises, blocks or lags behind must neither end nor delay the run."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from queue import Full, Queue
from typing import Any

import anyio

from ..accounting.sample import Sample, SampleSink
from ..accounting.telemetry import Metrics, get_logger
from ..errors import InvalidConfig
from ..util.blocking import in_thread
from ..util.repeated_errors import RepeatedErrors
from ..util.user_code import call_user
from .tracker import RunInfo, Tracker

log = get_logger("penstock.trackers")

CAPACITY = 64
"""Calls that may wait for a tracker; further ones are left out, and counted."""

FINISH_TIMEOUT_S = 30.0
"""Bound on the work of a tracker at the end of a run: an upload may take long."""

STOP_TIMEOUT_S = 1.0
"""The same where the run failed or was stopped."""


class Background:
    """One tracker, and the thread that calls it: a daemon, so that a call that hangs delays no end of the process."""

    def __init__(self, tracker: Tracker, run: RunInfo) -> None:
        self.name = type(tracker).__name__
        self._tracker = tracker
        self._run = run
        self._calls: Queue[Callable[[], None] | None] = Queue(CAPACITY)
        """Calls to make, in order; None after the last one."""
        self._errors = RepeatedErrors(log, "tracker_failed")
        self.failed = 0
        """Calls that raised, or were not made because `start` raised."""
        self.left_out = 0
        """Calls that were not made because too many were waiting."""
        self._thread = threading.Thread(target=self._work, name=f"penstock-{self.name}", daemon=True)
        self._thread.start()

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Have the metrics of a step logged; see `MetricSink`."""
        self._put(partial(self._tracker.log, metrics, step))

    def samples(self, samples: Sequence[Sample], step: int) -> None:
        """Have samples logged; see `SampleSink`."""
        self._put(partial(self._tracker.samples, samples, step))

    def finish(self, ok: bool, timeout_s: float) -> None:  # noqa: FBT001 (as in the protocol)
        """Close the tracker when all calls are made, and wait for that, at most `timeout_s`. Blocks."""
        deadline = time.monotonic() + timeout_s
        with suppress(Full):
            for call in (partial(self._tracker.close, ok), None):
                self._calls.put(call, timeout=max(0.0, deadline - time.monotonic()))
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            log.warning("tracker_close_timeout", tracker=self.name, waited_s=timeout_s, calls_left=self._calls.qsize())
        if self.failed or self.left_out:
            log.warning("tracker_incomplete", tracker=self.name, failed=self.failed, left_out=self.left_out)

    def _put(self, call: Callable[[], None]) -> None:
        try:
            self._calls.put_nowait(call)
        except Full:
            self.left_out += 1
            if self.left_out == 1:
                log.warning("tracker_too_slow", tracker=self.name, waiting=CAPACITY)

    def _work(self) -> None:
        began = self._made(partial(self._tracker.start, self._run))
        while (call := self._calls.get()) is not None:
            if not began:
                self.failed += 1
            else:
                self._made(call)

    def _made(self, call: Callable[[], Any]) -> bool:
        """Call, and return whether it did not raise."""
        try:
            call_user(call)
        except Exception as error:  # noqa: BLE001 (logged by name)
            self.failed += 1
            self._errors.record(error, tracker=self.name)
            return False
        return True


@asynccontextmanager
async def tracking(
    trackers: Sequence[Tracker],
    run: RunInfo,
    metrics: Metrics,
    sample_sinks: list[SampleSink],
    stopped: Callable[[], bool],
) -> AsyncIterator[None]:
    """Pass metrics and samples to `trackers` within the body, the run.

    Args:
        trackers: each is called in a thread of its own.
        run: the facts that they are given first.
        metrics: of the run.
        sample_sinks: of the run.
        stopped: returns whether a signal has stopped the run.
    """
    threads = [Background(tracker, run) for tracker in trackers]
    for thread in threads:
        metrics.sinks.append(thread.log)
        sample_sinks.append(thread.samples)
    ok = False
    try:
        yield
        ok = not stopped()
    finally:
        for thread in threads:
            metrics.sinks.remove(thread.log)
            sample_sinks.remove(thread.samples)
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for thread in threads:
                    tasks.start_soon(in_thread, thread.finish, ok, FINISH_TIMEOUT_S if ok else STOP_TIMEOUT_S)


def require_trackers(trackers: Sequence[object]) -> None:
    """Check that all are trackers.

    Raises:
        InvalidConfig: one is no tracker.
    """
    for tracker in trackers:
        if not isinstance(tracker, Tracker) or isinstance(tracker, type):
            raise InvalidConfig(
                f"trackers: expected objects with start(run), log(metrics, step), samples(samples, step) and "
                f"close(ok), got {tracker!r}"
            )
