"""Digests of the rows of a source: a continued run checks by them that it has the rows that it began with.

Files, those of a folder of Parquet files or of `datasets` too, are compared by their bytes, read in chunks; other rows
by their values. docs/resuming.md has the speed. Knows no order and no prompt.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from .arrow_rows import Frame, FrameRows
from .rows import Rows, Source, files_of

CHUNK_BYTES = 1 << 22
"""Bytes that are read at once."""

BATCH = 1024
"""Rows that are converted at once."""

SAMPLED = 10_000
"""Rows that are read of a source that is neither a file, a list nor of `datasets`: such a source may be slow."""


def digest_of(source: Source) -> str:
    """Return a digest of the rows of `source`, with the name of its algorithm. Blocks.

    Raises:
        TypeError: a row has a value that JSON cannot hold.
        OSError: a file cannot be read.
    """
    if not isinstance(source, str | Path):
        return _digest_of_rows(FrameRows(source) if isinstance(source, Frame) else source)
    return _digest_of_files(tuple((file, _version(file)) for file in files_of(Path(source))))


@lru_cache(maxsize=16)
def _digest_of_files(files: tuple[tuple[Path, tuple[int, ...]], ...]) -> str:
    """Return the digest of files, each with its version: training and evaluation often have the same ones."""
    digest = xxhash.xxh3_128()
    for path, _ in files:
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    return f"{digest.name.lower()}:{digest.hexdigest()}"


def _digest_of_rows(rows: Rows) -> str:
    digest = xxhash.xxh3_128()
    for batch in _batches(rows):
        digest.update(_encode(batch))
    return f"{digest.name.lower()}:{digest.hexdigest()}"


def _batches(rows: Any) -> Iterator[Any]:
    """Yield all rows of a list or a frame, or of `datasets` by columns; or some, spread evenly, of another source."""
    count = len(rows)
    if isinstance(rows, FrameRows):
        yield from (rows[place] for place in range(count))
        return
    if isinstance(rows, list | tuple) or _is_of_datasets(rows):
        yield from (rows[begin : begin + BATCH] for begin in range(0, count, BATCH))
        return
    for place in np.linspace(0, count - 1, min(count, SAMPLED)).astype(np.int64).tolist():
        yield rows[place]


def _is_of_datasets(rows: object) -> bool:
    """Return whether rows are a `Dataset`, without the import: it takes seconds."""
    module = sys.modules.get("datasets")
    return module is not None and isinstance(rows, module.Dataset)


def _plain(value: Any) -> Any:
    """Return a value that msgspec cannot encode as one that it can."""
    if callable(tolist := getattr(value, "tolist", None)):  # an array, a tensor
        return tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if value is None or isinstance(value, bool | Fraction):  # the first two as keys
        return str(value)
    raise TypeError(f"expected rows of values that JSON can hold, got {type(value).__name__}")


_encode = msgspec.json.Encoder(enc_hook=_plain).encode


def _version(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
