"""Write small files as a whole: after a kill, a full disk or a power failure a path holds the old file or the new one.

A file is written beside its path, synced to the disk, and renamed; then its folder is synced. Several processes may
write the same path: each has a file of its own, and the last one stays. The file beside the path is removed if writing
fails; that of a killed process is removed by `remove_unfinished`. Knows bytes, not their meaning.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .appending import write_all

UNFINISHED = ".unfinished"
"""Suffix of a file that is being written."""


def write_atomically(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Replace the file at `path`, if there is one, by a file of `mode` with `content`. Blocks.

    Raises:
        OSError: it cannot be written; the earlier file is unchanged, and the error has a path.
    """
    with _written(path, content, mode) as unfinished:
        unfinished.replace(path)


def create_atomically(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Create a file of `mode` with `content` at `path`, where there is none. Blocks.

    Raises:
        FileExistsError: there is one.
        OSError: it cannot be written; there is none at `path`, and the error has a path.
    """
    with _written(path, content, mode) as unfinished:
        path.hardlink_to(unfinished)


def link_atomically(path: Path, target: str) -> None:
    """Replace the file or link at `path`, if there is one, by a symbolic link to `target`. Blocks.

    Raises:
        OSError: it cannot be made; the earlier link is unchanged.
    """
    with _beside(path) as unfinished:
        unfinished.symlink_to(target)
        unfinished.replace(path)


def remove_unfinished(folder: Path) -> None:
    """Remove the files that killed processes left in `folder`; no other process may write there. Blocks."""
    for left in folder.glob(f".*{UNFINISHED}"):
        left.unlink(missing_ok=True)


def sync_to_disk(path: Path) -> None:
    """Wait until the file or the folder at `path` is on the disk. Blocks.

    Raises:
        OSError: it is not; the error has a path.
    """
    with naming(path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add `path` to an OSError in the body without one: those of reading, writing and syncing have none."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def _written(path: Path, content: bytes, mode: int) -> Iterator[Path]:
    """Yield a file with `content` that is on the disk, to be given the name `path`."""
    with _beside(path) as unfinished:
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            with naming(path):
                write_all(fd, content)
                os.fsync(fd)
        finally:
            os.close(fd)
        yield unfinished


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """Yield a name beside `path` that no other process has; a file that still has it afterwards is removed."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
        yield unfinished
        sync_to_disk(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)
