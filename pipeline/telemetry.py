"""What a run says of itself: flat metrics, step by step, and structured log events.

Metrics gather between optimizer steps and leave together: means as Σ/Σ (never a mean of means), totals as sums,
extremes as extremes, gauges as they stand. A sink is anything that takes (metrics, step). A sink that raises is
reported once and left out from then on: watching a run must never end it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol, SupportsFloat, TypeAlias

import msgspec
import numpy as np
import structlog
from numpy.typing import ArrayLike

from ..schemas.numbers import whole_number
from .appending import append_whole
from .os_errors import explaining_os_errors

__all__ = [
    "JsonlMetrics",
    "MetricSink",
    "Metrics",
    "MetricsReceiver",
    "WaitAggregator",
    "Waited",
    "get_logger",
    "report_waits",
]

MetricSink: TypeAlias = Callable[[dict[str, float], int], None]
"""Takes the metrics of one optimizer step, and the step."""


def get_logger(name: str) -> Any:
    """A structlog logger: `log.info("worker_started", worker=0, pid=…)`. Events, not prose.

    Where structlog is not configured, events go to the standard library's logger `name`, so that a script whose author
    set up neither sees warnings on stderr, and nothing on stdout.
    """
    return _Logger(name)


class _Logger:
    """Decides at every event, for a script may configure structlog long after it imported penstock."""

    def __init__(self, name: str) -> None:
        self._configured = structlog.get_logger(name)
        self._standard = structlog.wrap_logger(
            logging.getLogger(name),
            processors=[structlog.stdlib.filter_by_level, _as_standard],
            wrapper_class=structlog.stdlib.BoundLogger,
            context_class=dict,
        )

    def __getattr__(self, method: str) -> Any:
        return getattr(self._configured if structlog.is_configured() else self._standard, method)


def _as_standard(_: Any, __: str, fields: structlog.typing.EventDict) -> tuple[tuple[str], dict[str, Any]]:
    """An event as the arguments of a standard logger: `worker_started worker=0 pid=…`."""
    passed_on = {name: fields.pop(name) for name in ("exc_info", "stack_info") if name in fields}
    event = fields.pop("event")
    return (" ".join([event, *(f"{name}={value!r}" for name, value in fields.items())]),), passed_on


log = get_logger("penstock.telemetry")


class Observations(msgspec.Struct, frozen=True, array_like=True):
    """What one process has observed and not yet emitted: what a worker sends to the trainer's process."""

    means: dict[str, tuple[float, float]]
    totals: dict[str, float]
    maxima: dict[str, float]
    minima: dict[str, float]
    gauges: dict[str, float]


class Metrics:
    """Gathers observations; `emit` hands them to the sinks. One event loop uses it."""

    __slots__ = ("_gauges", "_maxima", "_means", "_minima", "_since", "_totals", "file", "observers", "sinks")

    def __init__(self, *sinks: MetricSink) -> None:
        self.sinks: list[MetricSink] = list(sinks)
        """Where each step's metrics go; one that raises is left out from then on."""
        self.file: MetricSink | None = None
        """Where a run that is kept in a folder writes each step; if it raises, so does `emit`."""
        self.observers: list[Callable[[], None]] = []
        """Called before observations are taken, for what is cheaper to look up now and then than to note at once."""
        self._means: dict[str, list[float]] = {}
        self._totals: dict[str, float] = {}
        self._maxima: dict[str, float] = {}
        self._minima: dict[str, float] = {}
        self._gauges: dict[str, float] = {}
        self._since = time.monotonic()

    def mean(self, name: str, values: ArrayLike, weight: ArrayLike | None = None) -> None:
        """Observe `values`; what is emitted is Σ value · weight / Σ weight."""
        weighted, weighs = _sums(values, weight)
        sums = self._means.setdefault(name, [0.0, 0.0])
        sums[0] += weighted
        sums[1] += weighs

    def total(self, name: str, amount: float = 1) -> None:
        """Add `amount`; what is emitted is the sum since the last step."""
        self._totals[name] = self._totals.get(name, 0.0) + amount

    def maximum(self, name: str, values: ArrayLike) -> None:
        """Observe `values`; what is emitted is the largest."""
        if np.size(values):
            self._maxima[name] = max(self._maxima.get(name, -np.inf), float(np.max(values)))

    def minimum(self, name: str, values: ArrayLike) -> None:
        """Observe `values`; what is emitted is the smallest."""
        if np.size(values):
            self._minima[name] = min(self._minima.get(name, np.inf), float(np.min(values)))

    def gauge(self, name: str, value: float) -> None:
        """Note how something stands; what is emitted is the last value, at every step from now on."""
        self._gauges[name] = float(value)

    @contextmanager
    def observing(self, observe: Callable[[], None]) -> Iterator[None]:
        """Call `observe` before all that is emitted within the body, and at its end."""
        self.observers.append(observe)
        try:
            yield
        finally:
            observe()
            self.observers.remove(observe)

    def take(self) -> Observations:
        """Everything observed since the last `take` or `emit`, for the `merge` of another process."""
        for observe in self.observers:
            observe()
        means = {name: (sums[0], sums[1]) for name, sums in self._means.items()}
        taken = Observations(means, self._totals, self._maxima, self._minima, dict(self._gauges))
        self._means, self._totals, self._maxima, self._minima = {}, {}, {}, {}
        return taken

    def merge(self, observed: Observations) -> None:
        """Add what another process observed."""
        for name, (weighted, weight) in observed.means.items():
            sums = self._means.setdefault(name, [0.0, 0.0])
            sums[0] += weighted
            sums[1] += weight
        for name, amount in observed.totals.items():
            self.total(name, amount)
        for name, value in observed.maxima.items():
            self.maximum(name, value)
        for name, value in observed.minima.items():
            self.minimum(name, value)
        self._gauges |= observed.gauges

    def __bool__(self) -> bool:
        """Whether anything was observed since the last `take` or `emit`."""
        return bool(self._means or self._totals or self._maxima or self._minima)

    def emit(self, step: int, extra: Mapping[str, SupportsFloat] | None = None) -> dict[str, float]:
        """Hand everything observed since the last step, and `extra`, to the sinks; returns it too.

        Raises:
            DiskFull, NotWritable, OutOfFileDescriptors: the run's own file of metrics cannot be written.
        """
        now = time.monotonic()
        observed = self.take()
        metrics = {name: weighted / weight for name, (weighted, weight) in observed.means.items() if weight}
        metrics |= observed.totals | observed.maxima | observed.minima | observed.gauges
        metrics["perf/time_per_step"] = now - self._since
        metrics |= {name: float(value) for name, value in (extra or {}).items()}
        self._since = now
        if self.file is not None:
            self.file(dict(metrics), step)
        for sink in list(self.sinks):
            self._deliver(sink, metrics, step)
        return metrics

    def _deliver(self, sink: MetricSink, metrics: dict[str, float], step: int) -> None:
        try:
            sink(dict(metrics), step)
        except Exception:
            self.sinks.remove(sink)
            log.exception("metric_sink_failed", sink=repr(sink), step=step)


def _sums(values: ArrayLike, weight: ArrayLike | None) -> tuple[float, float]:
    """Σ value · weight, and Σ weight. Most values are single ones, and those need no array."""
    if isinstance(values, int | float) and (weight is None or isinstance(weight, int | float)):
        weighs = 1.0 if weight is None else float(weight)
        return float(values) * weighs, weighs
    array = np.asarray(values, np.float64)
    if weight is None:
        return float(array.sum()), float(array.size)
    weights = np.broadcast_to(np.asarray(weight, np.float64), array.shape)
    return float((array * weights).sum()), float(weights.sum())


Waited: TypeAlias = Callable[[], tuple[float, float]]
"""How long a stage has waited in all so far, in seconds: for records, and for credit."""


@contextmanager
def report_waits(metrics: Metrics, stage: str, waited: Waited) -> Iterator[None]:
    """Report within the body how long `stage` waited, as `timing_s/<stage>/wait_input` and `…/wait_output`."""
    told = waited()

    def observe() -> None:
        nonlocal told
        now = waited()
        for name, before, after in zip(_names_of_waits(stage), told, now, strict=True):
            metrics.total(name, after - before)
        told = now

    with metrics.observing(observe):
        yield


def _names_of_waits(stage: str) -> tuple[str, str]:
    return f"timing_s/{stage}/wait_input", f"timing_s/{stage}/wait_output"


class MetricsReceiver(Protocol):
    """Takes in what other processes observed."""

    def merge(self, observed: Observations) -> None:
        """Add what another process observed."""
        ...


class WaitAggregator:
    """Passes on what the workers of one stage observed, and sums up how long they have waited."""

    def __init__(self, metrics: MetricsReceiver, stage: str) -> None:
        self._metrics = metrics
        self._names = _names_of_waits(stage)
        self.waited = (0.0, 0.0)
        """Seconds in all that were told so far, workers added up: for records, and for credit."""

    def merge(self, observed: Observations) -> None:
        """Add what a worker observed."""
        records, credit = (observed.totals.get(name, 0.0) for name in self._names)
        self.waited = (self.waited[0] + records, self.waited[1] + credit)
        self._metrics.merge(observed)


class JsonlMetrics:
    """Writes one JSON object a step: {"step": 3, "reward": 0.5, …}. The file is whole after every line.

    Args:
        path: of the file; what is there already stays.
        after_step: the step that this run goes on from: lines of later steps, which a run before wrote and no
            checkpoint holds, are cut off, and one that it did not finish. None leaves all.

    Raises:
        DiskFull, NotWritable, OutOfFileDescriptors: a line cannot be written; nothing of it stays.
    """

    def __init__(self, path: str | Path, *, after_step: int | None = None) -> None:
        self._path = Path(path)
        if after_step is not None:
            after_step = whole_number("after_step", after_step, least=0)
        with self._writing():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if after_step is not None and self._path.exists():
                os.truncate(self._path, _bytes_until(self._path, after_step))

    def __repr__(self) -> str:
        return f"JsonlSink({str(self._path)!r})"

    def __call__(self, metrics: dict[str, float], step: int) -> None:
        """Append one line."""
        self._write_line(msgspec.json.encode({"step": step} | metrics) + b"\n")

    def _write_line(self, line: bytes) -> None:
        with self._writing(), self._path.open("ab") as file:
            append_whole(file.fileno(), [line])

    def _writing(self) -> AbstractContextManager[None]:
        return explaining_os_errors("a line of metrics", self._path, or_else="then run again")


class _Line(msgspec.Struct):
    step: int


def _bytes_until(path: Path, step: int) -> int:
    """How long the file at `path` is up to the end of the line of `step`, or of the last one before it."""
    kept = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n") or msgspec.json.decode(line, type=_Line).step > step:
                break
            kept += len(line)
    return kept
