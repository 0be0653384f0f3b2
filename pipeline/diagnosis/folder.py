"""Read a run for its diagnosis from its folder, while it runs or afterwards. Opens files only to read.

Files of a folder may come from anywhere: each is decoded as the types that rules read, a line has a bound, a damaged
line is counted, and an unfinished last one is one that is being written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, BinaryIO, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from ..._schemas.bounds import MOST_NAMES, Count, Measure, Name
from ..._schemas.conversion import decode_json
from ..accounting.end_states import EndState
from ..errors import NoView
from ..trackers.jsonl import CONFIG, METRICS, SAMPLES
from ..trackers.rotated_lines import files_of
from .course import Courses
from .rules import READ
from .seen_run import SeenConfig, SeenRun

LONGEST_LINE = 2**20
"""Bytes of a line of metrics that is read: 4,000 metrics with long names. A longer one counts as damaged."""

LONGEST_SAMPLE = 2**24
"""Bytes of a line of samples: those of a file before it is rotated."""

LARGEST_FILE = 2**24
"""Bytes of a configuration, a summary or a view that is read."""

LAST_STEP = 2**53
"""The largest step that JSON's numbers hold exactly."""

SUMMARY, VIEW = "summary.json", "view.json"

T = TypeVar("T")

Metrics: TypeAlias = Annotated[dict[Name, Measure | None], Meta(max_length=MOST_NAMES)]
"""A line of metrics, its step included; null is a number that is not finite."""


class _Sample(msgspec.Struct):
    reward: Measure | None
    stop_reason: Name
    evaluated: Count | None = None


class _Balance(msgspec.Struct):
    ended: dict[EndState, Count]


class _Summary(msgspec.Struct):
    ledger: _Balance


class _Shown(msgspec.Struct):
    balance: _Balance


class _View(msgspec.Struct):
    shown: _Shown


_metrics = msgspec.json.Decoder(Metrics).decode
_sample = msgspec.json.Decoder(_Sample).decode


def read_run(folder: Path) -> SeenRun:
    """Return the facts about the run in `folder` that rules read. Blocks.

    Raises:
        NoView: there is no run in `folder`.
        OSError: a file cannot be read.
    """
    if not any((folder / name).is_file() for name in (METRICS, VIEW, SUMMARY)):
        raise NoView(f"expected the folder of a run, with {METRICS}, got {folder}: give that of the configuration")
    run = SeenRun(Courses(READ))
    _read_metrics(folder / METRICS, run)
    for file in files_of(folder / SAMPLES):
        _read_samples(file, run)
    run.config = _read(folder / CONFIG, SeenConfig, run) or run.config
    run.ends = _read_ends(folder, run)
    return run


def _read_metrics(path: Path, run: SeenRun) -> None:
    damaged = 0
    for line in _lines(path, LONGEST_LINE):
        try:
            metrics = _metrics(line)
            step = metrics.pop("step")
        except (msgspec.DecodeError, ValueError, KeyError):
            damaged += 1
            continue
        if step is None or not step.is_integer() or not 0 <= step <= LAST_STEP:
            damaged += 1
        else:
            run.courses.add(metrics, int(step))
    _note(run, path, damaged)


def _read_samples(path: Path, run: SeenRun) -> None:
    damaged = 0
    for line in _lines(path, LONGEST_SAMPLE):
        try:
            sample = _sample(line)
        except (msgspec.DecodeError, ValueError):
            damaged += 1
            continue
        run.samples.note(sample.reward, sample.stop_reason, sample.evaluated)
    _note(run, path, damaged)


def _read_ends(folder: Path, run: SeenRun) -> Mapping[EndState, int]:
    """Return the ends of trajectories, of the view while the run goes on and of the summary afterwards."""
    view = _read(folder / VIEW, _View, run)
    if view is not None:
        return view.shown.balance.ended
    summary = _read(folder / SUMMARY, _Summary, run)
    return {} if summary is None else summary.ledger.ended


def _read(path: Path, kind: type[T], run: SeenRun) -> T | None:
    """Return the object in a small file; None, and a note, if it has none."""
    with suppress(FileNotFoundError):
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
        try:
            return decode_json(content, kind)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            run.damaged.append(f"{path.name}: {error}")
    return None


def _lines(path: Path, longest: int) -> Iterator[bytes]:
    """Yield the complete lines of a file that may not exist; an empty one for a line that is too long."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        while line := file.readline(longest):
            if line.endswith(b"\n"):
                yield line
            elif len(line) == longest:
                _skip_line(file, longest)
                yield b""


def _skip_line(file: BinaryIO, longest: int) -> None:
    """Read on to the end of a line."""
    while (rest := file.readline(longest)) and not rest.endswith(b"\n"):
        pass


def _note(run: SeenRun, path: Path, damaged: int) -> None:
    if damaged:
        run.damaged.append(f"{path.name}: {damaged} lines that cannot be read")
