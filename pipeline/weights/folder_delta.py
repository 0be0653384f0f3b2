"""The file with the changes of a version since the one before, beside the whole version in a folder.

It has the deltas (`span_delta`) of the version's spans, one after the other. A span of which too much changed has none,
and is read from the whole version. The lengths of the deltas, and the hashes of the spans that result, are in the
description of the version. Knows neither publishers nor mirrors.
"""

from __future__ import annotations

from collections.abc import Callable
from io import BufferedReader
from pathlib import Path

import msgspec

from ..errors import WeightsDamaged
from .span_delta import apply_delta, delta_of, largest_delta
from .weight_transfer import digest, span_count, span_extent
from .weights import WeightWriter


class ChangedSpan(msgspec.Struct, frozen=True, array_like=True):
    """A span of a version, as it follows from the version before."""

    delta_bytes: int | None
    """Length of its delta; None if it has none."""
    xxh3: str
    """Hash of its bytes in this version: 128 bits, hexadecimal."""


def write_changes(path: Path, copies: WeightWriter, nbytes: int) -> tuple[ChangedSpan, ...]:
    """Write the changes between the two versions in `copies`, each of `nbytes` bytes, to `path`. Blocks.

    Returns the spans; none, and there is no file, if no span has a delta.

    Raises:
        OSError: it cannot be written.
    """
    spans: list[ChangedSpan] = []
    with path.open("wb") as file:
        for index in range(span_count(nbytes)):
            span, base = copies.spans(*span_extent(index, nbytes))
            delta = delta_of(base, span)
            if delta is not None:
                file.write(delta)
            spans.append(
                ChangedSpan(None if delta is None else len(delta), digest(span.data, copies.latest, index).hex())
            )
    if all(span.delta_bytes is None for span in spans):
        path.unlink()
        return ()
    return tuple(spans)


class ChangesReader:
    """Reads a version into the segment of a mirror that has the version before. Blocks."""

    def __init__(
        self, copies: WeightWriter, version: int, nbytes: int, header_bytes: int, check_cancelled: Callable[[], None]
    ) -> None:
        """Prepare.

        Args:
            copies: the segment; its newest version is the one before, and a buffer was begun for this one.
            version: the one to read.
            nbytes: of each version.
            header_bytes: of the file of a whole version, before the tensors.
            check_cancelled: called before each span; raises to end early.
        """
        self._copies = copies
        self._version = version
        self._nbytes = nbytes
        self._header_bytes = header_bytes
        self._check_cancelled = check_cancelled

    def read(self, path: Path, whole: Path, spans: tuple[ChangedSpan, ...]) -> None:
        """Fill the buffer by the changes in the file at `path`, and the file `whole` of the whole version.

        Args:
            path: the file that `write_changes` wrote.
            whole: the file of the whole version; only the spans without a delta are read.
            spans: those that `write_changes` returned.

        Raises:
            WeightsDamaged: a file is torn, altered, or of other versions.
            OSError: a file cannot be read.
        """
        if len(spans) != (expected := span_count(self._nbytes)):
            raise WeightsDamaged(f"{path}: expected {expected} spans, got {len(spans)}: it was altered")
        with path.open("rb") as changes, whole.open("rb") as file:
            for index, changed in enumerate(spans):
                self._check_cancelled()
                try:
                    self._fill(index, changed, changes, file)
                except ValueError as error:
                    raise WeightsDamaged(f"{path}: span {index}: {error}") from None

    def _fill(self, index: int, changed: ChangedSpan, changes: BufferedReader, whole: BufferedReader) -> None:
        start, end = span_extent(index, self._nbytes)
        base, span = self._copies.spans(start, end)
        if changed.delta_bytes is None:
            whole.seek(self._header_bytes + start)
            whole.readinto(span.data)
        else:
            apply_delta(_delta(changes, changed.delta_bytes, len(span)), base, span)
        if (found := digest(span.data, self._version, index).hex()) != changed.xxh3:
            raise ValueError(f"expected xxh3 {changed.xxh3}, got {found}: it was altered")


def _delta(changes: BufferedReader, nbytes: int, span_bytes: int) -> bytes:
    """Read the next delta, of `nbytes` bytes, of a span of `span_bytes` bytes.

    Raises:
        ValueError: it is longer than a delta of such a span, or the file ends before.
    """
    if not 0 <= nbytes <= largest_delta(span_bytes):
        raise ValueError(f"expected a delta of at most {largest_delta(span_bytes)} bytes, got {nbytes}: it was altered")
    content = changes.read(nbytes)
    if len(content) != nbytes:
        raise ValueError(f"expected a delta of {nbytes} bytes, got {len(content)}: it is torn")
    return content
