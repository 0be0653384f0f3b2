"""The lines of a file that another process may be writing: bounded in length, and counted where they are damaged.

Opens files only to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, BinaryIO, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from ..._schemas.bounds import MOST_NAMES, Measure, Name

T = TypeVar("T")

Metrics: TypeAlias = Annotated[dict[Name, Measure | None], Meta(max_length=MOST_NAMES)]
"""A line of metrics; null is a number that is not finite."""

LAST_STEP = 2**53
"""The largest step that JSON's numbers hold exactly."""

_metrics = msgspec.json.Decoder(Metrics).decode

LONGEST_LINE_BYTES = 8 * 2**20
"""Bytes of a line that is decoded; a longer one counts as damaged."""


@dataclass(slots=True)
class Damage:
    """The lines of one file that could not be read."""

    file: str
    lines: int = 0
    first: str = ""
    """The first of them, and its fault; empty without one."""

    def add(self, number: int, fault: str) -> None:
        """Count the line of this number."""
        self.lines += 1
        self.first = self.first or f"line {number}: {fault}"


def decoded_lines(file: BinaryIO, decode: Callable[[bytes], T], damage: Damage) -> Iterator[T]:
    """Yield the decoded lines of `file` from its present position; count those that cannot be decoded. Blocks.

    A last line without an end is being written, and is left out.
    """
    for number, line in enumerate(bounded_lines(file), 1):
        if line is None:
            damage.add(number, f"expected at most {LONGEST_LINE_BYTES:,} bytes, got more")
            continue
        try:
            value = decode(line)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            damage.add(number, str(error))
        else:
            yield value


def metrics_of(line: bytes) -> tuple[int, Metrics]:
    """Return the step of a line of metrics, and the others.

    Raises:
        ValueError, msgspec.DecodeError: it is no line of metrics.
    """
    metrics = _metrics(line)
    step = metrics.pop("step", None)
    if step is None or not 0 <= step <= LAST_STEP or not step.is_integer():
        raise ValueError(f"expected a step, got {step}")
    return int(step), metrics


def bounded_lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Yield each complete line; None for one that is too long."""
    too_long = False
    while line := file.readline(LONGEST_LINE_BYTES):
        if not line.endswith(b"\n"):
            too_long = len(line) == LONGEST_LINE_BYTES or too_long
            continue
        yield None if too_long else line
        too_long = False
