"""Lines of JSON in a file that is rotated by size: `samples.jsonl`, and before it `samples.jsonl.1` up to `.4`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ..util.appending import append_whole

ROTATE_BYTES = 16 * 2**20
"""Bytes from which a file is rotated."""

OLD_FILES = 4
"""Rotated files that are kept."""


class RotatedLines:
    """Appends lines; a file that has reached `ROTATE_BYTES` is renamed, and the oldest one is removed.

    >>> RotatedLines("samples.jsonl")
    RotatedLines('samples.jsonl')
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def __repr__(self) -> str:
        return f"RotatedLines({str(self._path)!r})"

    def append(self, lines: Iterable[bytes]) -> None:
        """Append all of `lines` or none. Blocks.

        Raises:
            OSError: they cannot be written.
        """
        with self._path.open("ab") as file:
            append_whole(file.fileno(), lines)
            full = file.tell() >= ROTATE_BYTES
        if full:
            self._rotate()

    def _rotate(self) -> None:
        """Rename every file to the next number, the oldest first, so that a kill in between loses no file."""
        for number in range(OLD_FILES, 0, -1):
            newer = rotated(self._path, number - 1)
            if newer.exists():
                newer.replace(rotated(self._path, number))


def rotated(path: Path, number: int) -> Path:
    """Return the path of a rotated file; that of the present one for 0."""
    return path.with_name(f"{path.name}.{number}") if number else path


def files_of(path: Path) -> Iterator[Path]:
    """Yield the files that exist, the newest first."""
    return (file for number in range(OLD_FILES + 1) if (file := rotated(path, number)).is_file())
