"""Rows of Parquet files, of a data frame, or of a folder that `datasets` saved: a row of an Arrow table is converted.

A folder of `datasets` is mapped into memory. Parquet files are decoded by row group, and the groups that were used last
are kept as Arrow tables. Needs both libraries, from the extra `train`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from ..._pipeline.errors import InvalidData
from ..._pipeline.util.extras import extra
from .file_version import FileVersion, check_unchanged, version_of
from .plain_values import plain_row

KEPT_BYTES = 1 << 28
"""Bytes of row groups that a process keeps. In a random order nearly every row is in another group than the last one,
and decoding a group takes milliseconds."""


LISTED = 8
"""Paths that a message names, at most."""


class ParquetRows:
    """The rows of Parquet files, by number: those of the first file, then those of the next one.

    A file is opened for every row group that is read: a set may have thousands.

    Raises:
        MissingExtra: pyarrow is not installed.
        InvalidData: one is no Parquet file or has other columns, a group of rows cannot be read, or JSON cannot hold a
            value.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        with extra("train", "PromptDataset of a Parquet file"):
            import pyarrow as pa  # noqa: PLC0415 (needs an extra)
            import pyarrow.parquet as pq  # noqa: PLC0415 (needs an extra)
        self._open = pq.ParquetFile
        self._errors = (pa.ArrowException, OSError)
        """OSError: a page is damaged (raised by Arrow)."""
        self._files = [_ParquetFile(path, version_of(path), self._metadata(path)) for path in paths]
        for file in self._files:
            _check_names(str(file.path), _names_of(file))
            _check_columns(self._files[0], file)
        self._groups = [(file, group) for file in self._files for group in range(file.metadata.num_row_groups)]
        counts = [file.metadata.row_group(group).num_rows for file, group in self._groups]
        self._ends = np.cumsum(np.array(counts, np.int64))
        """[groups] the number of the row after the last one of each group."""
        self._begins = {file.path: begin for file, begin in zip(self._files, _begins(self._files), strict=True)}
        """The number of the first row of each file."""
        self._tables: OrderedDict[int, Any] = OrderedDict()
        """Row groups, the one that was used last at the end."""
        self._kept_bytes = 0
        """Of the tables."""
        self._lock = threading.Lock()
        """For the tables."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return row `index`."""
        group = int(np.searchsorted(self._ends, index, side="right"))
        with self._lock:
            table = self._table(group)
        begin = int(self._ends[group]) - table.num_rows
        path = self._groups[group][0].path
        return _row(table.slice(index - begin, 1), lambda: f"{path}: row {index - self._begins[path]}")

    def _table(self, group: int) -> Any:
        if group not in self._tables:
            self._keep(group, self._read(*self._groups[group]))
        self._tables.move_to_end(group)
        return self._tables[group]

    def _keep(self, group: int, table: Any) -> None:
        """Keep a table, and let others go, those first that were not used for longest."""
        self._kept_bytes += table.nbytes
        while self._tables and self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= self._tables.popitem(last=False)[1].nbytes
        self._tables[group] = table

    def _metadata(self, path: Path) -> Any:
        try:
            with self._open(path) as file:
                return file.metadata
        except self._errors as error:
            raise InvalidData(f"{path}: expected a Parquet file, got one that cannot be read ({error})") from error

    def _read(self, file: _ParquetFile, group: int) -> Any:
        check_unchanged(file.path, file.version)
        try:
            with self._open(file.path, metadata=file.metadata) as opened:
                return opened.read_row_group(group)
        except self._errors as error:
            raise InvalidData(f"{file.path}: expected row group {group} to be readable, got {error}") from error


class _ParquetFile(NamedTuple):
    """One of the files of a set."""

    path: Path
    version: FileVersion
    """Version of the file when its metadata was read."""
    metadata: Any


def _begins(files: Sequence[_ParquetFile]) -> list[int]:
    return [0, *accumulate(file.metadata.num_rows for file in files[:-1])]


def _check_columns(first: _ParquetFile, other: _ParquetFile) -> None:
    expected, got = _names_of(first), _names_of(other)
    if set(expected) != set(got):
        raise InvalidData(
            f"{other.path}: expected the columns of {first.path.name} ({', '.join(expected)}), got {', '.join(got)}: "
            f"files of one set have the same columns"
        )


def _names_of(file: _ParquetFile) -> list[str]:
    names: list[str] = file.metadata.schema.to_arrow_schema().names
    return names


def _check_names(place: str, names: Sequence[Any]) -> None:
    """Check that columns have different names: a row has one value by name."""
    if repeated := sorted({str(name) for name in names if list(names).count(name) > 1}):
        raise InvalidData(f"{place}: expected columns with different names, got {repeated[0]!r} twice: rename one")


@runtime_checkable
class Frame(Protocol):
    """A table that Arrow can read: a DataFrame of pandas or polars, a Table of pyarrow."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Return the stream of Arrow's interface for C."""
        ...


class FrameRows:
    """The rows of a data frame, by number.

    Raises:
        MissingExtra: pyarrow is not installed.
        InvalidData: Arrow cannot hold a column, or JSON a value.
    """

    def __init__(self, frame: Frame) -> None:
        with extra("train", "PromptDataset of a data frame"):
            import pyarrow as pa  # noqa: PLC0415 (needs an extra)
        _check_names(type(frame).__name__, _columns_of(frame))
        try:
            self._table: Any = pa.table(frame)
        except (pa.ArrowException, TypeError) as error:
            raise InvalidData(
                f"{type(frame).__name__}: expected columns of one type each, got {error}: give a list of rows, as "
                f"to_dict('records') of pandas returns"
            ) from error

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return row `index`."""
        return _row(self._table.slice(index, 1), lambda: f"row {index}")


def _columns_of(frame: Any) -> Sequence[Any]:
    """Return the names of the columns of a frame of pandas or polars, or of a Table (`column_names`)."""
    names = getattr(frame, "column_names", None)
    return getattr(frame, "columns", ()) if names is None else names


class FolderRows:
    """The rows of a folder that `Dataset.save_to_disk` wrote, by number.

    Raises:
        MissingExtra: `datasets` is not installed.
        InvalidData: it is another folder, or one of several sets, or JSON cannot hold a value.
    """

    def __init__(self, path: Path) -> None:
        with extra("train", "PromptDataset of a folder"):
            import datasets  # noqa: PLC0415 (needs an extra, and takes seconds)
        try:
            loaded: Any = datasets.load_from_disk(path)
        except (OSError, ValueError) as error:
            raise InvalidData(
                f"{path}: expected a folder that save_to_disk of `datasets` wrote, got another one, without Parquet "
                f"files ({error}){_advice(path)}"
            ) from error
        if isinstance(loaded, dict):
            paths = ", ".join(str(path / split) for split in loaded)
            raise InvalidData(f"{path}: expected a folder of one set, got one of {len(loaded)}: take one of {paths}")
        self._path = path
        self._rows = loaded.with_format("arrow")

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return row `index`."""
        return _row(self._rows[index], lambda: f"{self._path}: row {index}")


def _advice(folder: Path) -> str:
    """Return the advice for a folder without a set: the folders and files in it that have one."""
    within = [*folder.glob("*/*.parquet"), *folder.glob("*/*/*.parquet")]
    found = {str(path.parent) for path in within} | {str(path) for path in folder.glob("*.jsonl")}
    return f": take one of {', '.join(sorted(found)[:LISTED])}" if found else "; for a file in it, give its path"


def _row(table: Any, place: Callable[[], str]) -> dict[str, Any]:
    """Return the only row of an Arrow table."""
    (row,) = table.to_pylist()
    return plain_row(row, place)
