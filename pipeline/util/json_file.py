"""JSON values in small files that are read back: written as a whole, with a checksum, and compared with it when read.

A checksum is a member of the object, `"checksum": "crc32:0a1b2c3d"`, over all other members; a file without one, of an
earlier version, is read too. A file that cannot be read back is either needed, and `read_json` raises an error with its
path, or it is not, and `read_json_or_set_aside` renames it and goes on.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ..._schemas.conversion import decode_json
from ..errors import FileDamaged
from .atomic_file import write_atomically
from .logger import get_logger
from .regular_file import open_regular

T = TypeVar("T")

CHECKSUM = "checksum"

DAMAGED = ".damaged"
"""Suffix of a file that was set aside."""

LARGEST_BYTES = 64 * 2**20
"""Bytes of a file that is read; those that are written have a few kilobytes."""

log = get_logger("penstock.files")


def write_json(path: Path, value: Any) -> None:
    """Replace the file at `path` by one with `value`, an object in JSON, and its checksum. Blocks.

    Raises:
        OSError: it cannot be written; the earlier file is unchanged, and the error has a path.
    """
    members: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(value))
    summed = msgspec.json.encode(members | {CHECKSUM: _checksum(msgspec.json.encode(members))})
    write_atomically(path, msgspec.json.format(summed, indent=2) + b"\n")


def read_json(path: Path, kind: type[T], *, remedy: str) -> T:
    """Return the object of `kind` in the file at `path`. Blocks.

    Args:
        path: of a file that `write_json` wrote, or one without a checksum.
        kind: a msgspec Struct, or `dict[str, Any]`.
        remedy: what to do about a damaged file, as the end of a sentence.

    Raises:
        FileNotFoundError: there is no such file.
        FileDamaged: it is empty, cut off or altered, or holds something else; the message has `remedy`.
    """
    try:
        return _decoded(path, kind)
    except _Unreadable as error:
        raise FileDamaged(f"{path}: expected to read back what was written, got {error}: {remedy}") from error


def read_json_or_set_aside(path: Path, kind: type[T], *, consequence: str) -> T | None:
    """Return the object of `kind` in the file at `path`, or None if there is none that can be read. Blocks.

    A file that cannot be read is renamed, and a warning names it with `consequence`.
    """
    try:
        return _decoded(path, kind)
    except FileNotFoundError:
        return None
    except _Unreadable as error:
        set_aside(path, str(error), consequence)
        return None


def set_aside(path: Path, reason: str, consequence: str) -> None:
    """Rename the file or folder at `path`, not needed any more, and warn of `reason` and `consequence`. Blocks.

    Raises:
        OSError: it cannot be renamed.
    """
    kept_as = path.with_name(path.name + DAMAGED)
    path.replace(kept_as)
    log.warning("file_set_aside", path=str(path), kept_as=kept_as.name, reason=reason, consequence=consequence)


class _Unreadable(Exception):
    """A file exists and cannot be read back; the message is the reason."""


def _decoded(path: Path, kind: type[T]) -> T:
    try:
        with open_regular(path) as file:
            content = file.read(LARGEST_BYTES + 1)
    except (FileNotFoundError, PermissionError):
        raise
    except OSError as error:  # of the disk, or a folder in its place
        raise _Unreadable(error.strerror or str(error)) from error
    if len(content) > LARGEST_BYTES:
        raise _Unreadable(f"more than {LARGEST_BYTES:,} bytes")
    try:
        return _value(content, kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _Unreadable(str(error) if content else "an empty file") from error


def _value(content: bytes, kind: type[T]) -> T:
    """Return the object in `content`; its checksum is compared if it has one."""
    members = decode_json(content, dict[str, Any])
    written = members.pop(CHECKSUM, None)
    encoded = msgspec.json.encode(members)
    if written is not None and written != (found := _checksum(encoded)):
        raise ValueError(f"{found} instead of {written}")
    return decode_json(encoded, kind)


def _checksum(content: bytes) -> str:
    return f"crc32:{zlib.crc32(content):08x}"
