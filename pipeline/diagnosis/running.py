"""`RunningDiagnosis`: the gravest finding in a run while it runs: a sink of metrics and of samples."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..._schemas.conversion import convert
from ..accounting.sample import Sample
from .course import Courses
from .finding import RunFinding
from .rules import READ, findings_in
from .seen_run import SeenConfig, SeenRun


class RunningDiagnosis:
    """Keeps the courses of the metrics that rules read, and applies the rules when it is asked, once for a step.

    Args:
        config: the hyper-parameters of the run; rules do without those of another shape.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._run = SeenRun(Courses(READ), _seen(config))
        self._lock = threading.Lock()
        """Held while a step is added, by the event loop, and while rules are applied, in a thread of a view."""
        self._found: RunFinding | None = None
        self._found_at = 0
        """The step that the rules were applied at."""

    def note(self, metrics: dict[str, float], step: int) -> None:
        """Add the metrics of an optimizer step; see `MetricSink`."""
        with self._lock:
            self._run.courses.add(metrics, step)

    def note_samples(self, samples: Sequence[Sample], step: int) -> None:  # noqa: ARG002 (each sample has its step)
        """Add samples; see `SampleSink`."""
        with self._lock:
            for sample in samples:
                self._run.samples.note(sample.reward, sample.stop_reason, sample.evaluated)

    def gravest(self) -> RunFinding | None:
        """Return the gravest finding in the run so far; None without any."""
        with self._lock:
            if self._run.step != self._found_at:
                self._found = next(iter(findings_in(self._run)), None)
                self._found_at = self._run.step
            return self._found


def _seen(config: Mapping[str, Any]) -> SeenConfig:
    try:
        return convert(dict(config), SeenConfig)
    except msgspec.ValidationError:  # of a script, whose hyper-parameters have names of its own
        return SeenConfig()
