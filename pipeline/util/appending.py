"""Append to a file so that it is whole after every write, also after a write that the disk had no room for."""

from __future__ import annotations

import os
from collections.abc import Iterable


def append_whole(fd: int, pieces: Iterable[bytes]) -> None:
    """Append all of `pieces` or none of them to the file of `fd`, open for appending. Blocks.

    Raises:
        OSError: they could not be written.
    """
    before = os.fstat(fd).st_size
    try:
        for piece in pieces:
            write_all(fd, piece)
    except OSError:
        os.ftruncate(fd, before)
        raise


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`, also where one call writes only a part, as on a disk that is almost full."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
