"""Write files and folders as a whole: after a kill, a full disk or a power failure a path holds the old or the new one.

A file or a folder is written beside its path, synced to the disk, and renamed; then the folder around it is synced.
Several processes may write the same path: each has a name of its own, and the last file stays. The one beside the path
is removed if writing fails; that of a process which was killed is removed by `remove_unfinished`. All renaming and
syncing of the package is here. Knows nothing about contents.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

from .logger import get_logger

UNFINISHED = ".unfinished"
"""Suffix of a file or a folder that is being written, or removed."""

DAMAGED = ".damaged"
"""Suffix of one that was set aside."""

log = get_logger("penstock.files")


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


def make_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Make the folder at `path`, where there is none or an empty one: `write` fills it under another name. Blocks.

    Args:
        path: of the folder.
        write: fills a given folder with files, and syncs them.

    Raises:
        OSError: it cannot be written; what was written is removed.
    """
    with _beside(path) as unfinished:
        unfinished.mkdir()
        write(unfinished)
        sync_to_disk(unfinished)
        unfinished.replace(path)


def remove_folder(path: Path) -> None:
    """Remove the folder at `path` with its files; after a kill it is whole or gone. Blocks.

    Raises:
        OSError: a file cannot be removed.
    """
    with _beside(path) as unfinished:
        path.replace(unfinished)


def remove_unfinished(folder: Path, prefix: str = "") -> None:
    """Remove what killed processes have left in `folder`, into which no other process writes now. Blocks.

    Args:
        folder: of the files and folders.
        prefix: of their names once they are finished; others stay.
    """
    for left in folder.glob(f".{prefix}*{UNFINISHED}"):
        _remove(left)


def set_aside(path: Path, reason: str, consequence: str) -> None:
    """Rename the file or folder at `path`, which nothing needs, and warn of `reason` and `consequence`. Blocks.

    Raises:
        OSError: it cannot be renamed.
    """
    kept_as = path.with_name(path.name + DAMAGED)
    path.replace(kept_as)
    log.warning("file_set_aside", path=str(path), kept_as=kept_as.name, reason=reason, consequence=consequence)


def rotate(paths: Sequence[Path]) -> None:
    """Give each file that exists at `paths` the path before it, the first one first: a kill loses none. Blocks."""
    for older, newer in pairwise(paths):
        if newer.exists():
            newer.replace(older)


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`, also where one call writes only a part, as on a disk that is almost full. Blocks."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def sync_to_disk(path: Path) -> None:
    """Wait until the file or the folder at `path` is on the disk. Blocks.

    Raises:
        OSError: it is not; the error has a path.
    """
    with _naming(path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
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
            with _naming(path):
                write_all(fd, content)
                os.fsync(fd)
        finally:
            os.close(fd)
        yield unfinished


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """Yield a name beside `path` that no other process has; whatever still has it afterwards is removed."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
        yield unfinished
        sync_to_disk(path.parent)
    except BaseException:
        with suppress(OSError):  # the first error is the one to explain
            _remove(unfinished)
        raise
    _remove(unfinished)


def _remove(path: Path) -> None:
    """Remove the file, link or folder at `path`, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
