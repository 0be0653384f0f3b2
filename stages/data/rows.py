"""Open the source of a data set: the reader that fits a file, a folder or a list."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

from ..._pipeline.errors import InvalidData
from ..._pipeline.util.hub import absent
from .arrow_rows import FolderRows, Frame, FrameRows, ParquetRows
from .file_kinds import HEAD_BYTES, is_parquet, other_kind
from .jsonl_rows import JsonlRows
from .parquet_shards import check_shards, parquet_sets
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


Source: TypeAlias = str | Path | Rows | Frame
"""A JSONL file, a Parquet file, a folder of Parquet files or of `datasets`, rows, or a data frame."""

SAVED = ("state.json", "dataset_dict.json")
"""Files of a folder that `datasets` saved: one of them is always there."""


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
        try:
            row = self._rows[index]
        except (LookupError, TypeError) as error:
            raise InvalidData(
                f"row {index}: expected rows by number, got {error!r} of {type(self._rows).__name__}"
            ) from error
        if not isinstance(row, Mapping):
            raise InvalidData(f"row {index}: expected a mapping from column to value, got {type(row).__name__}")
        return plain_row(row, lambda: f"row {index}")


def open_rows(source: Source) -> Rows:
    """Return the rows of a source. The content of a file decides whether it is read as JSON lines or as Parquet.

    Raises:
        InvalidData: no such source is at the path, or it is of another kind.
        MissingExtra: the kind needs a library that is not installed.
        OSError: the file cannot be read.
    """
    if isinstance(source, str | Path):
        return _rows_at(Path(source))
    return FrameRows(source) if isinstance(source, Frame) else PlainRows(_checked(source))


def _rows_at(path: Path) -> Rows:
    files = files_of(path)
    if path.is_dir() and not any(is_parquet(b"", file) for file in files):
        return FolderRows(path)
    heads = [_head(file) for file in files]
    for file, head in zip(files, heads, strict=True):
        _check_kind(file, head)
    return ParquetRows(files) if is_parquet(heads[0], files[0]) else JsonlRows(path)


def files_of(path: Path) -> list[Path]:
    """Return the files with the rows at a path: itself, the shards of a set, or the Arrow files of `datasets`.

    `folder/train` is the set `train` of a folder with several sets.

    Raises:
        InvalidData: the path does not exist, a shard is absent, or the folder has several sets.
    """
    if not path.is_dir():
        shards = [] if path.exists() or not path.parent.is_dir() else parquet_sets(path.parent).get(path.name, [])
        check_shards(shards)
        return shards or [_existing(path)]
    if any((path / name).exists() for name in SAVED) or not (sets := parquet_sets(path)):
        return sorted(path.glob("*.arrow"))
    if len(sets) > 1:
        parts = ", ".join(str(path / (name or files[0].name)) for name, files in sets.items())
        raise InvalidData(f"{path}: expected a folder of one set, got one of {len(sets)}: take one of {parts}")
    (files,) = sets.values()
    check_shards(files)
    return files


def _existing(path: Path) -> Path:
    if not path.exists():
        raise InvalidData(f"expected a file or a folder at {path}, got {absent(path)}")
    if not path.is_file():
        raise InvalidData(f"{path}: expected a file, got a pipe, a socket or a device: write its rows to a file")
    return path


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(HEAD_BYTES)


def _check_kind(path: Path, head: bytes) -> None:
    """Check that a file that begins with `head` is of a kind that is read."""
    if (other := other_kind(head)) is not None:
        remedy = other.remedy.format(path=path, stem=path.with_suffix(""))
        raise InvalidData(f"{path}: expected JSON lines or Parquet, got {other.kind}: {remedy}")


def _checked(source: Rows) -> Rows:
    """Return `source` if it has rows by number; a mapping has sets by name."""
    if isinstance(source, Mapping):
        raise InvalidData(f"expected rows by number, got {type(source).__name__}: take one of {', '.join(source)}")
    if not isinstance(source, Rows):
        raise InvalidData(f"expected a path, or rows with len() and [number], got {type(source).__name__}")
    return source
