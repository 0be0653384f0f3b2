"""Append to a file so that it is whole after every write, also after a write for which the disk had no room.

A file of lines may be rotated by size: `samples.jsonl`, and before it `samples.jsonl.1` up to `.4`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from .atomic_file import rotate, write_all

ROTATE_BYTES = 16 * 2**20
"""Bytes from which a file is rotated."""

OLD_FILES = 4
"""Rotated files that are kept."""


def append_whole(fd: int, pieces: Iterable[bytes]) -> None:
    """Append all of `pieces` or none of them to the file behind `fd`, which is open for appending. Blocks.

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


def append_lines(path: Path, lines: Iterable[bytes], *, rotates: bool = False) -> None:
    """Append all of `lines` or none of them to the file at `path`; a full one is rotated if `rotates`. Blocks.

    Raises:
        OSError: they cannot be written.
    """
    with path.open("ab") as file:
        append_whole(file.fileno(), lines)
        full = file.tell() >= ROTATE_BYTES
    if rotates and full:
        rotate(rotated(path))


def rotated(path: Path) -> list[Path]:
    """Return the paths of a file that is rotated, the oldest first and `path` last; some may not exist."""
    return [*(path.with_name(f"{path.name}.{number}") for number in range(OLD_FILES, 0, -1)), path]
