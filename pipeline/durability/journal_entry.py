"""Encode a record as an entry of a file, of a journal or a recording, and decode the entries of one, damaged or not.

An entry is a head, the `BundleHeader` of a record that travels alone, and its columns where its `Layout` puts them: the
content of a span of shared memory in reverse, so that a file is read from its beginning. Every entry begins on a cache
line and has a checksum over all of it. Sans-I/O: knows bytes and no file.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import numpy as np

from ..._schemas import InvalidRecord, TrainBatch, TrajectoryGroup
from ..._schemas.layout import ALIGNMENT, BundleHeader, aligned, encode_contents

Record = TypeVar("Record", TrajectoryGroup, TrainBatch)

MARK = b"penstock"
"""The first bytes of every entry: behind a damaged one, the next one is found by them."""

_HEAD = struct.Struct("<8sIIQ")
"""MARK, the checksum of all bytes after it, bytes of contents, bytes of columns."""

HEAD_BYTES = _HEAD.size

_LENGTHS = struct.Struct("<IQ")
"""The part of the head that the checksum covers."""

_PADDING = bytes(ALIGNMENT)


class CorruptRange(NamedTuple):
    """Bytes that are no entry."""

    first: int
    """Offset of the first of them."""
    last: int
    """Offset behind the last: the next whole entry, or the end."""


def encode_entry(record: TrajectoryGroup | TrainBatch) -> bytes:
    """Return `record` as an entry.

    Raises:
        InvalidRecord: it does not conform to its schema.
    """
    form, lengths, plain = record.schema.laid_out(record)
    contents = encode_contents(BundleHeader.alone(record.schema.kind, form, lengths, record.header()))
    body: list[bytes | memoryview] = [contents, _padding(_HEAD.size + len(contents))]
    for column in plain:
        body += [column.data.cast("B") if column.size else b"", _padding(column.nbytes)]
    measures = _LENGTHS.pack(len(contents), form.layout(lengths).nbytes)
    checksum = zlib.crc32(measures)
    for piece in body:
        checksum = zlib.crc32(piece, checksum)
    return b"".join([MARK, checksum.to_bytes(4, "little"), measures, *body])


def entry_of_head(head: bytes) -> tuple[int, str] | None:
    """Return the bytes of the entry that begins with `head`, and its checksum; None if `head` is that of none."""
    if len(head) < HEAD_BYTES:
        return None
    mark, checksum, contents_bytes, nbytes = _HEAD.unpack_from(head)
    return (aligned(HEAD_BYTES + contents_bytes) + nbytes, f"crc32:{checksum:08x}") if mark == MARK else None


def read_entries(data: bytes, kind: type[Record]) -> Iterator[Record | CorruptRange]:
    """Yield every whole record of `kind`, in memory of its own, and the damaged ranges between them."""
    at = 0
    while at < len(data):
        end = _end_of_entry(data, at)
        record = None if end is None else _decoded(data, at, kind)
        if end is None or record is None:
            end = _next_entry(data, at)
            yield CorruptRange(at, end)
        else:
            yield record
        at = end


def _end_of_entry(data: bytes, at: int) -> int | None:
    """Return the end of the entry at `at`; None where there is no whole entry."""
    if at + _HEAD.size > len(data):
        return None
    mark, checksum, contents_bytes, nbytes = _HEAD.unpack_from(data, at)
    end = at + aligned(_HEAD.size + contents_bytes) + nbytes
    if mark != MARK or end > len(data):
        return None
    covered = memoryview(data)[at + _HEAD.size - _LENGTHS.size : end]
    return int(end) if zlib.crc32(covered) == checksum else None


def _next_entry(data: bytes, damaged: int) -> int:
    """Return the beginning of the first whole entry after `damaged`, or the end."""
    at = data.find(MARK, damaged + 1)
    while at >= 0 and (at % ALIGNMENT or _end_of_entry(data, at) is None):
        at = data.find(MARK, at + 1)
    return at if at >= 0 else len(data)


def _decoded(data: bytes, at: int, kind: type[Record]) -> Record | None:
    """Return the record of a whole entry; None where it holds no valid record although its checksum is right."""
    _, _, contents_bytes, nbytes = _HEAD.unpack_from(data, at)
    first = at + _HEAD.size
    columns_at = at + aligned(_HEAD.size + contents_bytes)
    try:
        contents = BundleHeader.decode(memoryview(data)[first : first + contents_bytes])
        form = kind.schema.received(contents)
        layout = form.layout(contents.lengths())
        if len(contents.parts) != 1 or layout.nbytes != nbytes:
            return None
        payload = np.frombuffer(data, np.uint8, nbytes, columns_at).copy()  # lives as long as the record, alone
        payload.setflags(write=False)
        columns = form.view(layout.places, payload, contents.widths)
        form.check_numbers(list(columns.values()), contents.parts)
        return kind.assemble(contents.parts[0].header, columns)
    except InvalidRecord:
        return None


def _padding(nbytes: int) -> bytes:
    return _PADDING[: aligned(nbytes) - nbytes]
