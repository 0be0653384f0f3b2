"""The version of a file: a reader notices by it that the file was changed since the run began."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeAlias

from ..._pipeline.errors import InvalidData

FileVersion: TypeAlias = tuple[int, int, int]
"""Inode, bytes, and time of the last change in nanoseconds."""


def version_of(file: Path | int) -> FileVersion:
    """Return the version of a file, by its path or its descriptor."""
    status = os.fstat(file) if isinstance(file, int) else file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def check_unchanged(path: Path, version: FileVersion, descriptor: int | None = None) -> None:
    """Check that a file has the version that it had when it was opened first.

    Raises:
        InvalidData: it has another one.
    """
    if version_of(path if descriptor is None else descriptor) != version:
        raise InvalidData(f"{path}: expected the file as it was when the run began, got a changed one")
