"""A private directory for the sockets of a receiver, removed with it, or by a later process.

The directory has mode 0700 and holds a lock for as long as its owner lives. The kernel drops the lock of a killed
process, so a process that detects its death, or the next one that makes a directory here, finds it free and removes it.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..util.lock_file import LockFile
from ..util.os_errors import explaining_os_errors
from ..util.temporary_folder import temporary_folder

PREFIX = "penstock-"
LOCK = "owner"

EXIT_TIMEOUT_S, RETRY_S = 1.0, 0.005
"""Bound on the time that a dying process takes to release its lock, and the pause between two checks of that."""

LONGEST_PATH = 80
"""A Unix socket's path holds 107 bytes, and names are appended to this."""


@contextmanager
def socket_directory() -> Iterator[Path]:
    """Make a directory of mode 0700 for sockets, removed on leaving. Blocks: use it in a worker thread.

    Raises:
        NotWritable, DiskFull, OutOfFileDescriptors: it cannot be made.
    """
    sweep()
    root, other = _root(), "set XDG_RUNTIME_DIR to one where it may"
    with explaining_os_errors("sockets", root, elsewhere=other, or_else="or set XDG_RUNTIME_DIR to another folder"):
        path, lock = _make(root)
    try:
        yield path
    finally:
        _remove(path)
        lock.close()


@contextmanager
def shared_directory(name: str) -> Iterator[tuple[Path, bool]]:
    """Yield the directory that all processes of this user call `name`, and whether this process is its owner.

    One process at a time owns it, and removes it on leaving. Blocks: use it in a worker thread.

    Raises:
        NotWritable, DiskFull, OutOfFileDescriptors: it cannot be made, or belongs to another user.
    """
    root = _root()
    path = root / f"{PREFIX}{name}"
    with explaining_os_errors("sockets", root, elsewhere="set XDG_RUNTIME_DIR to one where it may"):
        lock = _claimed(path)
    try:
        yield path, lock is not None
    finally:
        if lock is not None:
            _remove(path)
            lock.close()


def _claimed(path: Path) -> LockFile | None:
    """Make the directory if it does not exist, and return its lock; None if another process has it."""
    while True:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        with suppress(FileNotFoundError):  # it was removed meanwhile
            found = path.lstat()
            if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
                raise PermissionError(errno.EACCES, f"{path} belongs to another user, or others may write to it")
            return _locked(path, LockFile(path / LOCK, mode=0o600))


def sweep() -> None:
    """Remove the directories of owners that were killed. Blocks.

    Making a directory does so too; this is for a process that detects a death and makes no directory.
    """
    for path in _root().glob(PREFIX + "*"):
        with suppress(OSError):
            if path.stat().st_uid == os.getuid() and (lock := _take_lock(path)) is not None:
                _remove(path)
                lock.close()


def sweep_after(path: Path) -> None:
    """Remove directory `path`, whose owner was found dead, and those of others. Blocks.

    A process that is killed closes one descriptor after the other: the end of its connection may be detected while its
    lock is still held.
    """
    sweep()
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    while path.exists() and time.monotonic() < deadline:
        time.sleep(RETRY_S)
        sweep()


def _remove(path: Path) -> None:
    """Remove the directory, the lock last: a process that is killed meanwhile leaves one that the next process removes.

    Only sockets are removed. A directory that holds anything else belongs to another program, whatever its name.
    """
    with suppress(OSError):
        found = [each for each in path.iterdir() if each.name != LOCK]
        if all(stat.S_ISSOCK(each.lstat().st_mode) for each in found):
            for each in (*found, path / LOCK):
                each.unlink()
            path.rmdir()


def _root() -> Path:
    """Return the folder of the directories."""
    root = Path(os.environ.get("XDG_RUNTIME_DIR") or temporary_folder())
    if not root.is_dir() or len(str(root)) > LONGEST_PATH:
        return Path("/tmp")  # noqa: S108 (the directories made in it are private)
    return root


def _make(root: Path) -> tuple[Path, LockFile]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        try:
            opened = LockFile(path / LOCK, mode=0o600)
        except OSError:
            path.rmdir()
            raise
        if (lock := _locked(path, opened)) is not None:
            return path, lock


def _take_lock(path: Path) -> LockFile | None:
    """Return the lock of a directory, or None where its owner lives or there is no lock."""
    try:
        opened = LockFile(path / LOCK, create=False)
    except OSError:
        return None
    return _locked(path, opened)


def _locked(path: Path, lock: LockFile) -> LockFile | None:
    """Return `lock` if it was free; close it, and return None, if it was not, or the directory is being removed."""
    if lock.take() and (path / LOCK).exists():
        return lock
    lock.close()
    return None
