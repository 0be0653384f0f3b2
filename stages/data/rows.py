"""Open the source of a data set: the reader that fits a file, a folder or a list."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

from ..._pipeline.errors import InvalidData
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
"""A JSONL file, or rows."""


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
        return plain_row(row)


def open_rows(source: Source) -> Rows:
    """Return the rows of a source.

    Raises:
        InvalidData: there is none at the path, or it is of another kind.
        OSError: the file cannot be read.
    """
    if not isinstance(source, str | Path):
        return PlainRows(source)
    path = Path(source)
    if not path.exists():
        raise InvalidData(f"expected a JSONL file at {path}, got nothing there: the path starts at {Path.cwd()}")
    return JsonlRows(path)
