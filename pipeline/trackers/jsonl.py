"""Jsonl: a tracker that writes files of JSON lines. Every run in a folder has one.

`metrics.jsonl` has a line for each optimizer step, `samples.jsonl`, which is rotated by size, one for each sample, and
`config.json` the hyper-parameters; in its own folder a run writes those itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from ..._schemas.numbers import whole_number
from ..accounting.sample import Sample
from ..util.appending import append_lines, rotated
from ..util.atomic_file import set_aside, write_atomically
from ..util.os_errors import explaining_os_errors
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

    def __repr__(self) -> str:
        return f"Jsonl({'' if self._given is None else repr(str(self._given))})"

    def start(self, run: RunInfo) -> None:
        """Cut off lines of later steps than that of `run`, if it has a folder, and write the hyper-parameters."""
        self._folder = folder = self._given or run.folder or Path(run.name)
        after_step = None if run.folder is None else run.step
        self._metrics = JsonlMetrics(folder / METRICS, after_step=after_step)
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
        lines = [msgspec.json.encode(sample) + b"\n" for sample in samples]
        with self._writing("a line of samples"):
            append_lines(self._folder / SAMPLES, lines, rotates=True)

    def close(self, ok: bool) -> None:  # noqa: FBT001 (the protocol's)
        """Do nothing: every line is written when it comes."""

    def _writing(self, what: str) -> AbstractContextManager[None]:
        return explaining_os_errors(what, self._folder, or_else="then run again")


def _cut_samples(folder: Path, after_step: int) -> None:
    """Cut off the samples of later steps, which the run trains again."""
    for file in reversed(rotated(folder / SAMPLES)):
        if file.is_file() and not _cut_lines(file, after_step):
            return  # nor are there any in older files


class JsonlMetrics:
    """Writes one JSON object for each step: {"step": 3, "reward": 0.5, …}. The file is whole after every line.

    Args:
        path: of the file; existing lines stay.
        after_step: the step that this run continues from: lines of later steps, which an earlier run wrote and no
            checkpoint holds, and an incomplete line are cut off. None leaves all.

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
                _cut_lines(self._path, after_step)

    def __repr__(self) -> str:
        return f"JsonlMetrics({str(self._path)!r})"

    def __call__(self, metrics: dict[str, float], step: int) -> None:
        """Append one line."""
        line = msgspec.json.encode({"step": step} | metrics) + b"\n"
        with self._writing():
            append_lines(self._path, [line])

    def _writing(self) -> AbstractContextManager[None]:
        return explaining_os_errors("a line of metrics", self._path, or_else="then run again")


class _Line(msgspec.Struct):
    """The step of a line; its other members are skipped."""

    step: int


def _cut_lines(path: Path, after_step: int) -> bool:
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
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            found = msgspec.json.decode(line, type=_Line).step
            if found < last:
                raise ValueError(f"step {found} after step {last} in line {number}")
            last = found
            kept += len(line) if found <= step else 0
    return kept
