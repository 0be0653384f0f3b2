"""Read the samples that a run has written, while it runs or afterwards. Opens nothing for writing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from ..accounting.sample import Sample
from ..errors import FileDamaged, NoSamples
from .jsonl import SAMPLES
from .rotated_lines import files_of

_decode = msgspec.json.Decoder(Sample).decode


def written_samples(folder: Path, step: int | None = None) -> list[Sample]:
    """Return the samples of a step, the best first; those of the last step with samples for None. Blocks.

    Raises:
        NoSamples: there are none, or none of `step`.
        OSError: a file cannot be read.
    """
    steps: set[int] = set()
    for file in files_of(folder / SAMPLES):
        samples = list(_samples_in(file))
        wanted = samples[-1].step if samples and step is None else step
        if found := [sample for sample in samples if sample.step == wanted]:
            return found
        steps |= {sample.step for sample in samples}
    if steps:
        raise NoSamples(f"expected a step of which {folder} has samples, {_listed(sorted(steps))}, got {step}")
    raise NoSamples(
        f"expected samples in {folder / SAMPLES}, got none: SinkTrainer(samples=Samples(tokenizer)) has a run write "
        f"them, and their first step may not have been trained yet"
    )


def _samples_in(file: Path) -> Iterator[Sample]:
    """Yield the samples of a file; its last line may be half written."""
    with suppress(FileNotFoundError), file.open("rb") as lines:  # it may have been rotated
        for number, line in enumerate(lines, 1):
            if line.endswith(b"\n"):
                yield _sample(line, file, number)


def _sample(line: bytes, file: Path, number: int) -> Sample:
    try:
        return _decode(line)
    except (msgspec.DecodeError, ValueError) as error:
        raise FileDamaged(f"{file}: expected a sample in line {number}, got {error}: remove the line") from error


def _listed(steps: list[int]) -> str:
    """Return steps as text: all of few, and the ends of many."""
    few = 6
    shown = [str(step) for step in steps]
    return ", ".join(shown if len(steps) <= few else [*shown[: few // 2], "…", *shown[-few // 2 :]])
