"""Rows of a JSONL file, read one at a time: only the offset of each is kept, 8 bytes a row.

The file is opened and closed for every read, and a file that was changed since is noticed. Blank lines are no rows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..._pipeline.errors import InvalidData
from .file_version import check_unchanged, version_of
from .plain_values import plain_row

BLOCK_BYTES = 1 << 24
"""Bytes that are searched for ends of lines at once."""

NEWLINE = ord("\n")

WHITE_SPACE = b" \t\r\n"
"""The bytes that JSON allows between values."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_decoder = msgspec.json.Decoder(dict[str, Any])


class JsonlRows:
    """The objects of a JSONL file, by number.

    Raises:
        InvalidData: a line is not a JSON object, or the file changed since it was opened.
        OSError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with FileIO(path) as file:
            self._version = version_of(file.fileno())
            self._begins = _row_begins(file)
            """[rows + 1] the offset of each row's beginning, and the end of the file."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._begins) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return row `index`."""
        begin, end = int(self._begins[index]), int(self._begins[index + 1])
        with FileIO(self._path) as file:
            check_unchanged(self._path, self._version, file.fileno())
            line = os.pread(file.fileno(), end - begin, begin)
        try:
            row = _decoder.decode(line)
            json.loads(line, object_pairs_hook=_without_repeats, parse_int=str, parse_float=str)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, _KeyTwice) as error:
            raise InvalidData(f"{self._place(begin)}: expected one JSON object in a line, got {error}") from None
        return plain_row(row, lambda: self._place(begin))

    def _place(self, begin: int) -> str:
        return f"{self._path}:{self._line_number(begin)}"

    def _line_number(self, begin: int) -> int:
        with FileIO(self._path) as file:
            blocks = (file.read(min(BLOCK_BYTES, begin - at)) for at in range(0, begin, BLOCK_BYTES))
            return 1 + sum(block.count(b"\n") for block in blocks)


class _KeyTwice(Exception):
    """An object has a key twice: a decoder would take one of them."""


def _without_repeats(pairs: Sequence[tuple[str, Any]]) -> None:
    """Check that each key of an object is there once."""
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        key = next(key for place, key in enumerate(keys) if key in keys[:place])
        raise _KeyTwice(f"the key {key!r} twice in one object")


def _row_begins(file: FileIO) -> NDArray[np.int64]:
    """Return the offset of each row's beginning, and the end of the file.

    A blank line becomes the end of the row before it: JSON allows white space there.
    """
    mark = file.read(len(BYTE_ORDER_MARK))
    at = file.seek(len(BYTE_ORDER_MARK) if mark == BYTE_ORDER_MARK else 0)
    begins: list[NDArray[np.int64]] = []
    at_line = True
    while block := file.read(BLOCK_BYTES):
        data = np.frombuffer(block, np.uint8)
        lines = np.flatnonzero(data == NEWLINE) + 1
        lines = np.append(0, lines) if at_line else lines
        at_line = block.endswith(b"\n")
        lines = lines[:-1] if at_line else lines  # the last one begins in the next block
        begins.append(at + _with_content(file, at, data, lines))
        at += len(block)
    return np.concatenate([*begins, [at]])


def _with_content(file: FileIO, at: int, data: NDArray[np.uint8], lines: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return those of `lines`, places in the block `data` at offset `at`, that are not blank."""
    keep: NDArray[np.bool_] = data[lines] != NEWLINE
    for line in np.flatnonzero(np.isin(data[lines], list(WHITE_SPACE)) & keep).tolist():
        keep[line] = not _is_blank(file, at + int(lines[line]))
    kept: NDArray[np.int64] = lines[keep]
    return kept


def _is_blank(file: FileIO, begin: int) -> bool:
    """Return whether the line at `begin` is white space."""
    while chunk := os.pread(file.fileno(), 4096, begin):
        line, newline, _ = chunk.partition(b"\n")
        if line.strip(WHITE_SPACE):
            return False
        if newline:
            return True
        begin += len(chunk)
    return True
