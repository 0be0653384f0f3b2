"""All that a page shows of some runs, read from their folders; every part of it is bounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..diagnosis.finding import RunFinding
from ..diagnosis.folder import read_run
from ..diagnosis.rules import findings_in, looked_at, rule_named
from ..durability.run_changes import parts_of
from ..errors import NoView
from ..trackers.jsonl import CONFIG, METRICS, SAMPLES
from ..trackers.rotated_lines import files_of
from ..trackers.written_lines import Damage
from ..view.published import FILE as VIEW
from .curve import MOST_POINTS
from .metric_curves import MOST_CURVES, Curves, read_curves
from .metric_units import Unit, units_of
from .run_state import RunState, state_of
from .settings import PartSettings, read_settings
from .shown_samples import MOST_BYTES, MOST_SAMPLES, ShownSamples, read_samples

TIME_FORMAT = "%Y-%m-%d %H:%M:%S %Z"
"""The time of day as `time.strftime` writes it for a page."""


class RunCurves(msgspec.Struct, frozen=True, kw_only=True):
    """The curves of one run."""

    name: str
    curves: Curves


class ShownFinding(RunFinding, frozen=True, kw_only=True):
    """A finding with the meaning of its rule."""

    means: str


class ReportedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    name: str
    state: RunState
    curves: Curves
    samples: ShownSamples
    settings: list[PartSettings]
    findings: list[ShownFinding]
    """Those of `penstock diagnose`, the gravest first."""
    looked_at: list[str]
    """The rules whose metrics the run has."""
    damage: list[str]
    """A sentence for each file with lines that could not be read."""


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a page."""

    written: str
    """The time at which the files were read."""
    runs: list[ReportedRun]
    units: dict[str, Unit]
    """The meaning of each metric."""
    rules: list[str]
    """What the page leaves out, a sentence each."""


def collect(folders: Sequence[Path], written: str) -> Collected:
    """Return what the page shows of the runs in `folders`. Opens files only to read; blocks.

    Args:
        folders: of the runs.
        written: the time of day, for readers.

    Raises:
        NoView: one of them is no folder of a run.
        OSError: a file cannot be read.
    """
    names = names_of(folders)
    runs = [_read(folder, name, len(folders)) for folder, name in zip(folders, names, strict=True)]
    return Collected(
        written=written,
        runs=runs,
        units=units_of({name for run in runs for name in run.curves.drawn}),
        rules=list(dict.fromkeys(rule for run in runs for rule in _rules(run))),
    )


def read_runs(folders: Sequence[Path]) -> list[RunCurves]:
    """Return the curves of the runs in `folders`. Opens files only to read; blocks.

    Raises:
        NoView: one of them is no folder of a run.
        OSError: a file cannot be read.
    """
    for folder in folders:
        _require_run(folder)
    return [
        RunCurves(name=name, curves=read_curves(folder, Damage(METRICS)))
        for folder, name in zip(folders, names_of(folders), strict=True)
    ]


def stamp_of(folders: Sequence[Path]) -> tuple[tuple[int, int], ...]:
    """Return a value that changes when a file that `collect` reads does. Blocks."""
    found = [path.stat() for folder in folders for path in _files(folder) if path.is_file()]
    return tuple((each.st_mtime_ns, each.st_size) for each in found)


def _files(folder: Path) -> list[Path]:
    return [folder / METRICS, folder / VIEW, *files_of(folder / SAMPLES), *(path for path, _ in parts_of(folder))]


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return a name for each run: the last part of its folder, and as many before it as tell them apart.

    >>> names_of([Path("a/run"), Path("b/run"), Path("c")])
    ['a/run', 'b/run', 'c']
    """
    parts = [folder.resolve().parts if str(folder) == "." else folder.parts for folder in folders]
    lengths = [1] * len(parts)
    while True:
        names = ["/".join(each[-length:]) for each, length in zip(parts, lengths, strict=True)]
        times = Counter(names)
        longer = [n for n, name in enumerate(names) if times[name] > 1 and lengths[n] < len(parts[n])]
        if not longer:
            return names
        for n in longer:
            lengths[n] += 1


def _require_run(folder: Path) -> None:
    if not any((folder / file).is_file() for file in (METRICS, CONFIG, VIEW)):
        raise NoView(
            f"expected the folder of a run, with {METRICS}, got {folder}: give the folder of Pipeline.run(folder=…), "
            f"or that of the configuration"
        )


def _read(folder: Path, name: str, runs: int) -> ReportedRun:
    _require_run(folder)
    metrics, samples = Damage(METRICS), Damage(SAMPLES)
    curves, shown = read_curves(folder, metrics), read_samples(folder, samples, runs)
    seen = read_run(folder) if (folder / METRICS).is_file() else None
    return ReportedRun(
        name=name,
        state=state_of(folder),
        curves=curves,
        samples=shown,
        settings=read_settings(folder),
        findings=[] if seen is None else [_shown(finding) for finding in findings_in(seen)],
        looked_at=[] if seen is None else looked_at(seen),
        damage=[damaged(damage) for damage in (metrics, samples) if damage.lines],
    )


def _shown(finding: RunFinding) -> ShownFinding:
    return ShownFinding(**msgspec.structs.asdict(finding), means=rule_named(finding.rule).means)


def damaged(damage: Damage) -> str:
    """Return a sentence about the lines of a file that could not be read."""
    return f"{damage.file}: {damage.lines:,} damaged lines are left out, the first is {damage.first}"


def _rules(run: ReportedRun) -> list[str]:
    curves, rules = run.curves, []
    if curves.values_in_a_point > 1:
        rules.append(
            f"A curve has at most {MOST_POINTS:,} points. A longer one is drawn as means of 2, 4, 8, … successive "
            f"values (here up to {curves.values_in_a_point}), in a band from the lowest to the highest of them."
        )
    if curves.left_out:
        rules.append(f"{curves.left_out} metrics are not drawn: there are more than {MOST_CURVES:,} of a run.")
    return rules + _rules_of_samples(run)


def _rules_of_samples(run: ReportedRun) -> list[str]:
    samples = run.samples
    if len(samples.shown) == samples.found:
        return []
    rule = (
        f"{run.name}: of {samples.found:,} samples of {samples.steps_found:,} steps, {len(samples.shown):,} samples of "
        f"{samples.steps_shown:,} steps are shown: those of every second, fourth, eighth, … step and the last one, so "
        f"that all runs have at most {MOST_SAMPLES:,}, in at most {MOST_BYTES // 2**20} MiB of lines."
    )
    return [rule]
