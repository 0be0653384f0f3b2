"""Appending to a file so that it is whole after every write, also after one that the disk had no room for."""

from __future__ import annotations

import os
from collections.abc import Iterable

__all__ = ["append_whole"]


def append_whole(fd: int, pieces: Iterable[bytes]) -> None:
    """Append all of `pieces` to the file behind `fd`, which is open for appending, or nothing of them. Blocks.

    Raises:
        OSError: they could not be written.
    """
    before = os.fstat(fd).st_size
    try:
        for piece in pieces:
            _write_all(fd, piece)
    except OSError:
        os.ftruncate(fd, before)
        raise


def _write_all(fd: int, data: bytes) -> None:
    """Write `data` also where the disk takes it piece by piece, as one does that is about to be full."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
