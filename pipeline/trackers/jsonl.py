"""Jsonl: a tracker that writes files of JSON lines. Every run in a folder has one.

`metrics.jsonl` has a line for each optimizer step, `samples.jsonl`, rotated by size, one for each sample, and
`config.json` the hyper-parameters; in its own folder a run writes those itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from ..accounting.sample import Sample
from ..accounting.telemetry import JsonlMetrics, cut_lines
from ..util.atomic_file import write_atomically
from ..util.os_errors import explaining_os_errors
from .rotated_lines import RotatedLines, files_of
from .tracker import RunInfo

CONFIG, METRICS, SAMPLES = "config.json", "metrics.jsonl", "samples.jsonl"


class Jsonl:
    """Writes metrics and samples as lines of JSON, and the hyper-parameters.

    A run that is continued does not repeat the lines of the steps that it trains again: they are cut off first.

    Args:
        folder: of the files, for a run without a folder; files that exist are continued. None for that of the run.

    Raises:
        DiskFull, NotWritable, OutOfFileDescriptors: by its methods: a file cannot be written; no part of a line stays.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._given = None if folder is None else Path(folder)
        self._folder = self._given or Path()
        self._metrics: JsonlMetrics | None = None
        self._lines: RotatedLines | None = None

    def __repr__(self) -> str:
        return f"Jsonl({'' if self._given is None else repr(str(self._given))})"

    def start(self, run: RunInfo) -> None:
        """Cut off lines of later steps than that of `run`, if it has a folder, and write the hyper-parameters."""
        self._folder = folder = self._given or run.folder or Path(run.name)
        after_step = None if run.folder is None else run.step
        self._metrics = JsonlMetrics(folder / METRICS, after_step=after_step)
        self._lines = RotatedLines(folder / SAMPLES)
        with self._writing("the files of a tracker"):
            if after_step is not None:
                _cut_samples(folder, after_step)
            if run.config and not (folder == run.folder and (folder / CONFIG).exists()):  # there the run has written it
                write_atomically(
                    folder / CONFIG, msgspec.json.format(msgspec.json.encode(run.config), indent=2) + b"\n"
                )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append a line."""
        assert self._metrics is not None  # noqa: S101 (started before)
        self._metrics(dict(metrics), step)

    def samples(self, samples: Sequence[Sample], step: int) -> None:  # noqa: ARG002 (each sample has its step)
        """Append a line for each sample."""
        assert self._lines is not None  # noqa: S101 (started before)
        with self._writing("a line of samples"):
            self._lines.append(msgspec.json.encode(sample) + b"\n" for sample in samples)

    def close(self, ok: bool) -> None:  # noqa: FBT001 (the protocol's)
        """Return at once: every line is written when it comes."""

    def _writing(self, what: str) -> AbstractContextManager[None]:
        return explaining_os_errors(what, self._folder, or_else="then run again")


def _cut_samples(folder: Path, after_step: int) -> None:
    """Cut off the samples of later steps: the run trains these again."""
    for file in files_of(folder / SAMPLES):
        if not cut_lines(file, after_step):
            return  # nor are there any in older files
