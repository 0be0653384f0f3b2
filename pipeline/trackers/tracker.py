"""The protocol of a tracker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from ..accounting.sample import Sample


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a run that are known when it begins."""

    name: str
    """The last part of the run's folder; `run` without one."""
    folder: Path | None = None
    """The folder of the run; None for a run without one."""
    step: int = 0
    """The optimizer step that the run continues from; 0 for one that begins."""
    config: Mapping[str, Any] = {}
    """The hyper-parameters, as plain values."""


@runtime_checkable
class Tracker(Protocol):
    """Takes the metrics and the samples of a run. All calls are made in one thread, and may block."""

    def start(self, run: RunInfo, /) -> None:
        """Begin; called once, first."""
        ...

    def log(self, metrics: Mapping[str, float], step: int, /) -> None:
        """Take the metrics of an optimizer step."""
        ...

    def samples(self, samples: Sequence[Sample], step: int, /) -> None:
        """Take the samples of an optimizer step, and of the evaluation that is emitted with it."""
        ...

    def close(self, ok: bool, /) -> None:  # noqa: FBT001 (the protocol's only argument)
        """Finish; `ok` is false where the run failed or was stopped."""
        ...
