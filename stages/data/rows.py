"""Open the source of a data set: the reader that fits a file, a folder or a list."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

from ..._pipeline.errors import InvalidData
from .arrow_rows import FolderRows, ParquetRows
from .jsonl_rows import JsonlRows
from .plain_values import plain_row


@runtime_checkable
class Rows(Protocol):
    """Rows by number: a list of mappings, a `datasets.Dataset`."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        """Return a row: its values by column."""
        ...


Source: TypeAlias = str | Path | Rows
"""A JSONL file, a Parquet file, a folder that `datasets` saved, or rows."""


class PlainRows:
    """The rows of a list, with values that JSON can hold."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return row `index`.

        Raises:
            InvalidData: it is no mapping, or has a value that JSON cannot hold.
        """
        row = self._rows[index]
        if not isinstance(row, Mapping):
            raise InvalidData(f"row {index}: expected a mapping from column to value, got {type(row).__name__}")
        return plain_row(row, lambda: f"row {index}")


def open_rows(source: Source) -> Rows:
    """Return the rows of a source. A file is JSONL unless its name ends in `.parquet`.

    Raises:
        InvalidData: there is none at the path, or it is of another kind.
        MissingExtra: the kind needs a library that is not installed.
        OSError: the file cannot be read.
    """
    if not isinstance(source, str | Path):
        return PlainRows(_checked(source))
    path = Path(source)
    if not path.exists():
        raise InvalidData(f"expected a file or a folder at {path}, got nothing there (looked from {Path.cwd()})")
    if path.is_dir():
        return FolderRows(path)
    return ParquetRows(path) if path.suffix == ".parquet" else JsonlRows(path)


def _checked(source: Rows) -> Rows:
    """Return `source` if it has rows by number; a mapping has sets by name."""
    if isinstance(source, Mapping):
        raise InvalidData(f"expected rows by number, got {type(source).__name__}: take one of {', '.join(source)}")
    if not isinstance(source, Rows):
        raise InvalidData(f"expected a path, or rows with len() and [number], got {type(source).__name__}")
    return source
