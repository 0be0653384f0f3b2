"""The samples of a run that a page shows: all of few, and of many those of some steps, evenly over the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from ..._schemas.bounds import cut
from ..accounting.sample import Sample, SampleBranch
from ..trackers.jsonl import SAMPLES
from ..trackers.rotated_lines import files_of
from ..trackers.written_lines import Damage, decoded_lines
from ..util.regular_file import open_regular

MOST_SAMPLES = 2_000
"""Samples of all runs on a page."""

MOST_BYTES = 24 * 2**20
"""Bytes of their lines."""

LONGEST_SHOWN = 50_000
"""Characters of a prompt, a completion or an answer that a page shows."""

_decode = msgspec.json.Decoder(Sample).decode


class ShownSamples(msgspec.Struct, frozen=True, kw_only=True):
    """Samples as the page has them."""

    shown: list[Sample]
    found: int
    """Samples in the files."""
    steps_found: int
    """Steps that have some."""
    steps_shown: int


def read_samples(folder: Path, damage: Damage, runs: int = 1) -> ShownSamples:
    """Return the samples of the run in `folder` that a page of so many runs shows. Blocks.

    Raises:
        OSError: a file cannot be read.
    """
    with ExitStack() as stack:
        files = _opened(folder, stack)
        sizes: dict[int, tuple[int, int]] = {}
        for step, nbytes in _sizes(files, damage):
            count, before = sizes.get(step, (0, 0))
            sizes[step] = (count + 1, before + nbytes)
        steps = chosen_steps(sizes, MOST_SAMPLES // runs, MOST_BYTES // runs)
        for file in files:
            file.seek(0)
        shown = list(_shown(files, steps, runs))
    return ShownSamples(
        shown=shown,
        found=sum(count for count, _ in sizes.values()),
        steps_found=len(sizes),
        steps_shown=len({sample.of_step for sample in shown}),
    )


def chosen_steps(sizes: dict[int, tuple[int, int]], most: int, most_bytes: int) -> set[int]:
    """Return the steps that are shown: every k-th and the last one, for the smallest k = 1, 2, 4, … that fits.

    Args:
        sizes: the number of samples of each step, and their bytes.
        most: samples.
        most_bytes: bytes.

    >>> sorted(chosen_steps({step: (10, 100) for step in range(1, 8)}, most=50, most_bytes=10_000))
    [1, 3, 5, 7]
    """
    steps = sorted(sizes)
    every = 1
    while True:
        chosen = {*steps[::every], *steps[-1:]}
        count, nbytes = (sum(sizes[step][part] for step in chosen) for part in (0, 1))
        if (count <= most and nbytes <= most_bytes) or every >= len(steps):
            return chosen
        every *= 2


def _opened(folder: Path, stack: ExitStack) -> list[BinaryIO]:
    """Return the files, the oldest first: all are opened before one is read, which may be rotated meanwhile."""
    opened: list[BinaryIO] = []
    for path in files_of(folder / SAMPLES):
        with suppress(FileNotFoundError):
            opened.append(stack.enter_context(open_regular(path)))
    return opened[::-1]


def _sizes(files: list[BinaryIO], damage: Damage) -> Iterator[tuple[int, int]]:
    """Yield the step of each sample, and the bytes of its line."""
    for file in files:
        yield from decoded_lines(file, lambda line: (_decode(line).of_step, len(line)), damage)


def _shown(files: list[BinaryIO], steps: set[int], runs: int) -> Iterator[Sample]:
    """Yield the samples of some steps; fewer if those of a single step are too many."""
    left, bytes_left = MOST_SAMPLES // runs, MOST_BYTES // runs
    for file in files:
        for sample, nbytes in decoded_lines(file, lambda line: (_decode(line), len(line)), Damage(SAMPLES)):
            if sample.of_step in steps and left and nbytes <= bytes_left:
                left, bytes_left = left - 1, bytes_left - nbytes
                yield _cut(sample)


def _cut(sample: Sample) -> Sample:
    """Return a sample whose texts are short enough for a page."""
    return msgspec.structs.replace(
        sample,
        prompt=cut(sample.prompt, LONGEST_SHOWN),
        completion=cut(sample.completion, LONGEST_SHOWN),
        answer=None if sample.answer is None else cut(sample.answer, LONGEST_SHOWN),
        branches=[_cut_branch(branch) for branch in sample.branches],
    )


def _cut_branch(branch: SampleBranch) -> SampleBranch:
    return msgspec.structs.replace(
        branch, prompt=cut(branch.prompt, LONGEST_SHOWN), completion=cut(branch.completion, LONGEST_SHOWN)
    )
