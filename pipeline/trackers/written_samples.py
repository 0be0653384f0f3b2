"""Read the samples that a run has written, while it runs or afterwards. Opens files only to read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from ..accounting.sample import Sample
from ..errors import FileDamaged, NoSamples
from ..util.regular_file import open_regular
from .jsonl import SAMPLES
from .rotated_lines import files_of
from .written_lines import LONGEST_LINE_BYTES, bounded_lines

_decode = msgspec.json.Decoder(Sample).decode


def written_samples(folder: Path, step: int | None = None) -> list[Sample]:
    """Return the samples of a step and of the evaluation of its weights, the best first. Blocks.

    For None they are those of the last step with samples, and of the last evaluation.

    Raises:
        NoSamples: there are none, or none of `step`.
        OSError: a file cannot be read.
    """
    steps: set[int] = set()
    found: dict[bool, list[Sample]] = {False: [], True: []}
    """Of training, and of evaluations."""
    for sample in _written(folder):
        steps.add(sample.of_step)
        if step not in {None, sample.of_step}:
            continue
        of_kind = found[sample.evaluated is not None]
        if of_kind and of_kind[-1].of_step != sample.of_step:
            of_kind.clear()
        of_kind.append(sample)
    if samples := [*found[False], *found[True]]:
        return samples
    if steps:
        raise NoSamples(f"expected a step of which {folder} has samples, {_listed(sorted(steps))}, got {step}")
    raise NoSamples(
        f"expected samples in {folder / SAMPLES}, got none: SinkTrainer(samples=Samples(tokenizer)) has a run write "
        f"them, and their first step may not have been trained yet"
    )


def _written(folder: Path) -> Iterator[Sample]:
    """Yield all samples in their order; the last line may be half written."""
    with ExitStack() as stack:
        files: list[tuple[Path, BinaryIO]] = []
        for file in files_of(folder / SAMPLES):  # all are opened first: a file is rotated while another one is read
            with suppress(FileNotFoundError):
                files.append((file, stack.enter_context(open_regular(file))))
        for file, lines in reversed(files):
            for number, line in enumerate(bounded_lines(lines), 1):
                yield _sample(line, file, number)


def _sample(line: bytes | None, file: Path, number: int) -> Sample:
    if line is None:
        raise _damaged(file, number, f"more than {LONGEST_LINE_BYTES:,} bytes")
    try:
        return _decode(line)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _damaged(file, number, str(error)) from error


def _damaged(file: Path, number: int, got: str) -> FileDamaged:
    return FileDamaged(f"{file}: expected a sample in line {number}, got {got}: remove the line")


def _listed(steps: list[int]) -> str:
    """Return steps as text: all of few, and the ends of many."""
    few = 6
    shown = [str(step) for step in steps]
    return ", ".join(shown if len(steps) <= few else [*shown[: few // 2], "…", *shown[-few // 2 :]])
