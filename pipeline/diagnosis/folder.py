"""Read a run for its diagnosis from its folder, while it runs or afterwards. Opens files only to read.

Files of a folder may come from anywhere: each is decoded as the types that rules read, a line has a bound, a damaged
line is counted, and an unfinished last one is one that is being written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from ..._schemas.bounds import Count, Measure, Name
from ..._schemas.conversion import decode_json
from ..accounting.end_states import EndState
from ..errors import NoView
from ..trackers.jsonl import CONFIG, METRICS, SAMPLES
from ..trackers.rotated_lines import files_of
from ..trackers.written_lines import Damage, decoded_lines, metrics_of
from ..util.regular_file import open_regular
from .course import Courses
from .rules import READ
from .seen_run import SeenConfig, SeenRun

LARGEST_FILE = 2**24
"""Bytes of a configuration, a summary or a view that is read."""

SUMMARY, VIEW = "summary.json", "view.json"

T = TypeVar("T")


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
    for step, metrics in _decoded(path, metrics_of, run):
        run.courses.add(metrics, step)


def _read_samples(path: Path, run: SeenRun) -> None:
    for sample in _decoded(path, _sample, run):
        run.samples.note(sample.reward, sample.stop_reason, sample.evaluated)


def _decoded(path: Path, decode: Callable[[bytes], T], run: SeenRun) -> Iterator[T]:
    """Yield the decoded lines of a file that may not exist; note those that cannot be read."""
    damage = Damage(path.name)
    with suppress(FileNotFoundError), open_regular(path) as file:
        yield from decoded_lines(file, decode, damage)
    if damage.lines:
        run.damaged.append(f"{path.name}: {damage.lines} lines that cannot be read")


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
        with open_regular(path) as file:
            content = file.read(LARGEST_FILE + 1)
        try:
            return decode_json(content, kind)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            run.damaged.append(f"{path.name}: {error}")
    return None
