"""The descriptor: the small message that says where a record lies, and the record's own table of contents.

A descriptor names a span of slots; what lies there begins with a `Contents`, so that a span can be read without its
descriptor when the process that published it was killed before the descriptor left (docs/decisions/0002).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from .columns import Array, ColumnSpec
from .errors import InvalidRecord

__all__ = [
    "ALIGNMENT",
    "Contents",
    "Descriptor",
    "aligned",
    "read_contents",
    "record_bytes",
    "view_columns",
    "write_contents",
]

ALIGNMENT = 64
"""Bytes: every column begins on a cache line."""

CARRIED = (np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64)
DTYPES: dict[str, np.dtype[Any]] = {
    dtype.str: dtype for dtype in map(np.dtype, (*CARRIED, np.float16, np.float32, np.float64))
}
"""The dtypes that may be carried, by their name on the wire. Nothing else is ever made of what a peer says."""

CODES = {dtype: code for code, dtype in DTYPES.items()}


class Descriptor(NamedTuple):
    """Where a published record lies."""

    sequence: int
    """Counts the records of one sender from 1."""
    slot: int
    """First slot of the span; where the payload travels in frames (tcp), the sequence again."""
    slots: int
    """Slots in the span; 0 where the payload travels in frames."""
    generation: int
    """How often the first slot had been used."""
    nbytes: int
    """Bytes of the record, contents and padding included."""


class Contents(NamedTuple):
    """What lies at the beginning of a span: the record's kind, its columns in order, and all that is not a column."""

    kind: str
    columns: tuple[ColumnSpec, ...]
    header: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Contents).decode


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment."""
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


def record_bytes(contents: bytes, columns: dict[str, Array]) -> int:
    """Bytes that a record takes: its contents and its columns, each rounded up."""
    nbytes = aligned(len(contents))
    for column in columns.values():
        nbytes += aligned(column.nbytes)
    return nbytes


def write_contents(kind: str, columns: dict[str, Array], header: bytes) -> bytes:
    """The contents of a record, encoded.

    Raises:
        InvalidRecord: a column has a dtype that is not carried.
    """
    try:
        specs = [(name, CODES[column.dtype], column.shape) for name, column in columns.items()]
    except KeyError:
        odd = {name: str(column.dtype) for name, column in columns.items() if column.dtype not in CODES}
        raise InvalidRecord(f"columns: expected dtypes among {sorted(DTYPES)}, got {odd}") from None
    return _encode((kind, specs, header))


def read_contents(encoded: bytes | memoryview) -> Contents:
    """The inverse of `write_contents`.

    Raises:
        InvalidRecord: the bytes are no contents.
    """
    try:
        return _decode(encoded)
    except msgspec.DecodeError as error:
        raise InvalidRecord(f"contents: expected (kind, columns, header), got {error}") from None


def view_columns(specs: Sequence[ColumnSpec], payload: Array, offset: int) -> dict[str, Array]:
    """The columns of a record as views into `payload` (uint8, 1-D), where they lie one after another from `offset`.

    Raises:
        InvalidRecord: a column has a dtype that is not carried, a negative size, or reaches beyond the payload.
    """
    columns: dict[str, Array] = {}
    buffer = payload.data  # asked once: numpy would describe the whole array anew for every column
    for name, code, shape in specs:
        dtype = DTYPES.get(code)
        if dtype is None:
            raise InvalidRecord(f"{name}: expected a dtype among {sorted(DTYPES)}, got {code!r}")
        try:
            if min(shape, default=0) < 0:
                raise ValueError("a negative size")  # noqa: TRY301 (numpy takes −1 for "as much as there is")
            column: Array = np.ndarray(shape, dtype, buffer, offset)
        except (TypeError, ValueError) as error:
            raise InvalidRecord(
                f"{name}: expected {code} {list(shape)} within {len(payload)} bytes from byte {offset}, got {error}"
            ) from None
        columns[name] = column
        offset += aligned(column.nbytes)
    return columns
