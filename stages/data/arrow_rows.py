"""Rows of a Parquet file, or of a folder that the library `datasets` saved: Arrow tables, a row of which is converted.

A folder of `datasets` is mapped into memory. A Parquet file is decoded by row group, and the groups that were used last
are kept as Arrow tables. Needs the extra `train`, which brings both libraries.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..._pipeline.errors import InvalidData
from ..._pipeline.util.extras import extra
from .plain_values import plain_row

KEPT_BYTES = 1 << 28
"""Bytes of row groups that a process keeps. In a random order nearly every row is in another group than the last one,
and decoding a group takes milliseconds."""


class ParquetRows:
    """The rows of a Parquet file, by number.

    Raises:
        MissingExtra: pyarrow is not installed.
        InvalidData: it is no Parquet file, a group of rows cannot be read, or JSON cannot hold a value.
    """

    def __init__(self, path: Path) -> None:
        with extra("train", "PromptDataset of a Parquet file"):
            import pyarrow as pa  # noqa: PLC0415 (needs an extra)
            import pyarrow.parquet as pq  # noqa: PLC0415 (needs an extra)
        self._path = path
        self._errors = (pa.ArrowException, OSError)
        """OSError: what Arrow raises where a page is damaged."""
        try:
            self._file: Any = pq.ParquetFile(path)
        except self._errors as error:
            raise InvalidData(f"{path}: expected a Parquet file, got one that cannot be read ({error})") from error
        metadata = self._file.metadata
        counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._ends = np.cumsum(np.array(counts, np.int64))
        """[groups] the number of the row after the last one of each group."""
        self._tables: OrderedDict[int, Any] = OrderedDict()
        """Row groups, the one that was used last at the end."""
        self._kept_bytes = 0
        """Of the tables."""
        self._lock = threading.Lock()
        """For the file and the tables: a reader of Arrow belongs to one thread at a time."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return row `index`."""
        group = int(np.searchsorted(self._ends, index, side="right"))
        with self._lock:
            table = self._table(group)
        begin = int(self._ends[group]) - table.num_rows
        return _row(table.slice(index - begin, 1), lambda: f"{self._path}: row {index}")

    def _table(self, group: int) -> Any:
        if group not in self._tables:
            self._keep(group, self._read(group))
        self._tables.move_to_end(group)
        return self._tables[group]

    def _keep(self, group: int, table: Any) -> None:
        """Keep a table, and let others go, those first that were not used for longest."""
        self._kept_bytes += table.nbytes
        while self._tables and self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= self._tables.popitem(last=False)[1].nbytes
        self._tables[group] = table

    def _read(self, group: int) -> Any:
        try:
            return self._file.read_row_group(group)
        except self._errors as error:
            raise InvalidData(f"{self._path}: expected row group {group} to be readable, got {error}") from error


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
                f"{path}: expected a folder that save_to_disk of `datasets` wrote, got another one ({error}); for a "
                f"file in it, give its path"
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


def _row(table: Any, place: Callable[[], str]) -> dict[str, Any]:
    """Return the only row of an Arrow table."""
    (row,) = table.to_pylist()
    return plain_row(row, place)
