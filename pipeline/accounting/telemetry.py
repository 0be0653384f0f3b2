"""Metrics of a run, as flat mappings for each optimizer step.

Metrics are aggregated between optimizer steps and emitted together: means as Σ/Σ (never a mean of means), totals as
sums, extremes as extremes, gauges as their last values. A sink is a callable of (metrics, step). A sink that raises is
logged once and removed: watching a run must never end it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, SupportsFloat, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import ArrayLike

from ..._schemas.bounds import LONGEST_NAME, MOST_ENTRIES, MOST_NAMES, Measure, Name
from ..._schemas.conversion import decode_json
from ..._schemas.numbers import whole_number
from ..util.appending import append_whole
from ..util.json_file import set_aside
from ..util.logger import get_logger as get_logger  # noqa: PLC0414 (modules above take it from here)
from ..util.os_errors import explaining_os_errors
from ..util.regular_file import open_regular
from ..util.user_code import call_user
from .end_values import MOST_VALUES, statistics_of, thinned, with_sampled
from .evaluations import EvaluationPart, Evaluations

V = TypeVar("V")

MetricSink: TypeAlias = Callable[[dict[str, float], int], None]
"""Takes the metrics of one optimizer step, and the step."""


log = get_logger("penstock.telemetry")


EndValues: TypeAlias = Annotated[list[Measure], Meta(max_length=MOST_VALUES)]

Measures: TypeAlias = Annotated[dict[Name, Measure], Meta(max_length=MOST_NAMES)]
"""Values by the name of their metric."""


class Observations(msgspec.Struct, frozen=True, array_like=True):
    """The observations that one process has not yet emitted; a worker sends them to the trainer's process."""

    means: Annotated[dict[Name, tuple[Measure, Measure]], Meta(max_length=MOST_NAMES)] = {}
    """Σ value · weight, and Σ weight."""
    totals: Measures = {}
    maxima: Measures = {}
    minima: Measures = {}
    gauges: Measures = {}
    evaluations: Annotated[list[EvaluationPart], Meta(max_length=MOST_ENTRIES)] = []
    ends: Annotated[dict[Name, EndValues], Meta(max_length=MOST_NAMES)] = {}
    """The values of trajectories that ended, by name; see `values_of`."""

    def within_bounds(self) -> Observations:
        """Return the observations that a message can hold: without metrics of a longer name, or beyond the number."""
        named = ("means", "totals", "maxima", "minima", "gauges")
        return msgspec.structs.replace(self, **{name: _within_bounds(getattr(self, name)) for name in named})


def _within_bounds(values: Mapping[str, V]) -> Mapping[str, V]:
    if len(values) <= MOST_NAMES and max(map(len, values), default=0) <= LONGEST_NAME:
        return values
    kept = dict(islice(((name, value) for name, value in values.items() if len(name) <= LONGEST_NAME), MOST_NAMES))
    log.warning("metrics_dropped", dropped=len(values) - len(kept), longest_name=LONGEST_NAME, most_names=MOST_NAMES)
    return kept


class Metrics:
    """Aggregates observations until `emit` passes them to the sinks. One event loop uses it."""

    __slots__ = ("_observed", "_since", "evaluations", "file", "observers", "send_evaluation", "sinks")

    def __init__(self, *sinks: MetricSink) -> None:
        self.sinks: list[MetricSink] = list(sinks)
        """Called with each step's metrics; one that raises is removed."""
        self.file: MetricSink | None = None
        """The file of metrics of a run in a folder; if it raises, so does `emit`."""
        self.observers: list[Callable[[], None]] = []
        """Called before observations are taken, for values that are cheaper to read then than to record at changes."""
        self.evaluations: Evaluations = Evaluations()
        """Merges the parts of evaluations, in the trainer's process."""
        self.send_evaluation: Callable[[], None] | None = None
        """In a worker: sends the observations, now that they hold the part of an evaluation. None merges parts here."""
        self._observed = Observations()
        self._since = time.monotonic()

    def mean(self, name: str, values: ArrayLike, weight: ArrayLike | None = None) -> None:
        """Observe `values`; emits Σ value · weight / Σ weight."""
        self._add_to_mean(name, *_sums(values, weight))

    def _add_to_mean(self, name: str, weighted: float, weight: float) -> None:
        before = self._observed.means.get(name, (0.0, 0.0))
        self._observed.means[name] = (before[0] + weighted, before[1] + weight)

    def total(self, name: str, amount: float = 1) -> None:
        """Add `amount`; emits the sum since the last step."""
        self._observed.totals[name] = self._observed.totals.get(name, 0.0) + amount

    def maximum(self, name: str, values: ArrayLike) -> None:
        """Observe `values`; emits the largest."""
        if np.size(values):
            self._observed.maxima[name] = max(self._observed.maxima.get(name, -np.inf), float(np.max(values)))

    def minimum(self, name: str, values: ArrayLike) -> None:
        """Observe `values`; emits the smallest."""
        if np.size(values):
            self._observed.minima[name] = min(self._observed.minima.get(name, np.inf), float(np.min(values)))

    def gauge(self, name: str, value: float) -> None:
        """Set a present value; emits the last one, at every step from now on."""
        self._observed.gauges[name] = float(value)

    def ended(self, values: Mapping[str, Sequence[float]]) -> None:
        """Observe values of trajectories that ended, as `values_of`; emits their `statistics_of`, and those of all."""
        for name, some in values.items():
            kept = self._observed.ends.setdefault(name, [])
            kept.extend(some)
            self._observed.ends[name] = thinned(kept)

    def evaluated(self, part: EvaluationPart) -> None:
        """Observe this worker's part of an evaluation; emitted with the next step once the parts of all are here."""
        if self.send_evaluation is None:
            self.evaluations.add(part)
        else:
            self._observed.evaluations.append(part)
            self.send_evaluation()

    @contextmanager
    def observing(self, observe: Callable[[], None]) -> Iterator[None]:
        """Call `observe` before each emission within the body, and at its end."""
        self.observers.append(observe)
        try:
            yield
        finally:
            observe()
            self.observers.remove(observe)

    def take(self) -> Observations:
        """Return all observations since the last `take` or `emit`, for the `merge` of another process."""
        for observe in self.observers:
            observe()
        taken, self._observed = self._observed, Observations(gauges=dict(self._observed.gauges))
        return taken

    def merge(self, observed: Observations) -> None:
        """Add the observations of another process."""
        for name, sums in observed.means.items():
            self._add_to_mean(name, *sums)
        for name, amount in observed.totals.items():
            self.total(name, amount)
        for name, value in observed.maxima.items():
            self.maximum(name, value)
        for name, value in observed.minima.items():
            self.minimum(name, value)
        self._observed.gauges.update(observed.gauges)
        self.ended(observed.ends)
        for part in observed.evaluations:
            self.evaluated(part)

    def forget(self, names: Collection[str]) -> None:
        """Drop the observations of some metrics since the last step, and their gauges."""
        observed = self._observed
        for values in (observed.means, observed.totals, observed.maxima, observed.minima, observed.gauges):
            for name in values.keys() & names:
                del values[name]

    def __bool__(self) -> bool:
        """Return whether anything was observed since the last `take` or `emit`."""
        observed = self._observed
        counted = observed.means or observed.totals or observed.maxima or observed.minima
        return bool(counted or observed.evaluations or observed.ends)

    def emit(self, step: int, extra: Mapping[str, SupportsFloat] | None = None) -> dict[str, float]:
        """Pass all observations since the last step, and `extra`, to the sinks, and return them.

        Raises:
            DiskFull, NotWritable, OutOfFileDescriptors: the run's own file of metrics cannot be written.
        """
        now = time.monotonic()
        observed = self.take()
        metrics = {name: weighted / weight for name, (weighted, weight) in observed.means.items() if weight}
        metrics |= statistics_of(with_sampled(observed.ends))
        metrics |= observed.totals | observed.maxima | observed.minima | observed.gauges | self.evaluations.take()
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
            call_user(sink, dict(metrics), step)
        except Exception:
            self.sinks.remove(sink)
            log.exception("metric_sink_failed", sink=repr(sink), step=step)


def _sums(values: ArrayLike, weight: ArrayLike | None) -> tuple[float, float]:
    """Return Σ value · weight, and Σ weight. Most values are single numbers, and need no array."""
    if isinstance(values, int | float) and (weight is None or isinstance(weight, int | float)):
        weighs = 1.0 if weight is None else float(weight)
        return float(values) * weighs, weighs
    array = np.asarray(values, np.float64)
    if weight is None:
        return float(array.sum()), float(array.size)
    weights = np.broadcast_to(np.asarray(weight, np.float64), array.shape)
    return float((array * weights).sum()), float(weights.sum())


Waited: TypeAlias = Callable[[], tuple[float, float]]
"""Returns the seconds that a stage has waited in all so far: for records, and for credit."""


@contextmanager
def report_waits(metrics: Metrics, stage: str, waited: Waited) -> Iterator[None]:
    """Report the waits of `stage` within the body, as `timing_s/<stage>/wait_input` and `…/wait_output`."""
    reported = waited()

    def observe() -> None:
        nonlocal reported
        now = waited()
        for name, before, after in zip(_names_of_waits(stage), reported, now, strict=True):
            metrics.total(name, after - before)
        reported = now

    with metrics.observing(observe):
        yield


def _names_of_waits(stage: str) -> tuple[str, str]:
    return f"timing_s/{stage}/wait_input", f"timing_s/{stage}/wait_output"


class WaitAggregator:
    """Passes on the observations of the workers of one stage, and adds up their waits."""

    def __init__(self, metrics: Metrics, stage: str) -> None:
        self._metrics = metrics
        self._names = _names_of_waits(stage)
        self.waited = (0.0, 0.0)
        """Seconds reported so far, workers added up: for records, and for credit."""

    def merge(self, observed: Observations) -> None:
        """Add the observations of a worker."""
        records, credit = (observed.totals.get(name, 0.0) for name in self._names)
        self.waited = (self.waited[0] + records, self.waited[1] + credit)
        self._metrics.merge(observed)

    def forget(self, names: Collection[str]) -> None:
        """See `Metrics.forget`."""
        self._metrics.forget(names)

    @property
    def evaluations(self) -> Evaluations:
        """Return the evaluations of the run."""
        return self._metrics.evaluations


class JsonlMetrics:
    """Writes one JSON object for each step: {"step": 3, "reward": 0.5, …}. The file is whole after every line.

    Args:
        path: of the file; existing lines stay.
        after_step: the step that this run continues from: lines of later steps, written by an earlier run and in no
            checkpoint, and an incomplete line are cut off. `None` leaves all.

    Raises:
        DiskFull, NotWritable, OutOfFileDescriptors: a line cannot be written; no part of it stays.
    """

    def __init__(self, path: str | Path, *, after_step: int | None = None) -> None:
        self._path = Path(path)
        if after_step is not None:
            after_step = whole_number("after_step", after_step, least=0)
        with self._writing():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if after_step is not None and self._path.exists():
                cut_lines(self._path, after_step)

    def __repr__(self) -> str:
        return f"JsonlMetrics({str(self._path)!r})"

    def __call__(self, metrics: dict[str, float], step: int) -> None:
        """Append one line."""
        line = msgspec.json.encode({"step": step} | metrics) + b"\n"
        with self._writing(), self._path.open("ab") as file:
            append_whole(file.fileno(), [line])

    def _writing(self) -> AbstractContextManager[None]:
        return explaining_os_errors("a line of metrics", self._path, or_else="then run again")


class _Line(msgspec.Struct):
    step: int


def cut_lines(path: Path, after_step: int) -> bool:
    """Cut off the lines of later steps in the file at `path`, and an incomplete one; return whether there were any.

    A file with a line that cannot be read, or with steps that are out of order, is set aside instead. Blocks.
    """
    try:
        kept = _bytes_until(path, after_step)
    except (msgspec.DecodeError, ValueError) as error:
        set_aside(path, str(error), "it has the lines of earlier steps, and another file those that follow")
        return True
    if kept == path.stat().st_size:
        return False
    os.truncate(path, kept)
    return True


def _bytes_until(path: Path, step: int) -> int:
    """Return the bytes of the file at `path` up to the end of the line of `step`, or of the last one before it."""
    kept, last = 0, 0
    with open_regular(path) as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            found = decode_json(line, _Line).step
            if found < last:
                raise ValueError(f"step {found} after step {last} in line {number}")
            last = found
            kept += len(line) if found <= step else 0
    return kept
