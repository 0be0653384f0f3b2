"""Where the sockets of a receiver live: a private directory that is removed with it, or by whoever comes next.

The directory has mode 0700 and holds a lock for as long as its owner lives. The kernel drops the lock of a killed
process, so whoever saw it die, or else the next one that makes a directory here, finds it free and sweeps it.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..os_errors import explaining_os_errors

__all__ = ["socket_directory", "sweep", "sweep_after"]

PREFIX = "penstock-"
LOCK = "lock"

DYING_S, LOOK_AGAIN_S = 1.0, 0.005
"""How long a dying process may take to let go of its lock, and how often is looked meanwhile."""

LONGEST_PATH = 80
"""A Unix socket's path holds 107 bytes, and names are appended to this."""


@contextmanager
def socket_directory() -> Iterator[Path]:
    """A directory of mode 0700 for sockets, removed on leaving. Blocks: use it in a worker thread.

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
        os.close(lock)


def sweep() -> None:
    """Remove what was left by owners that were killed. Blocks.

    Making a directory does so too; this is for whoever has seen one die and makes none.
    """
    for path in _root().glob(PREFIX + "*"):
        with suppress(OSError):
            if path.stat().st_uid == os.getuid() and (lock := _take_lock(path)) is not None:
                _remove(path)
                os.close(lock)


def sweep_after(path: Path) -> None:
    """Remove directory `path`, whose owner was seen to die, and what others left. Blocks.

    A process that is killed closes one descriptor after the other: its door may be shut, which is what was seen, while
    its lock is still held.
    """
    sweep()
    deadline = time.monotonic() + DYING_S
    while path.exists() and time.monotonic() < deadline:
        time.sleep(LOOK_AGAIN_S)
        sweep()


def _remove(path: Path) -> None:
    """Remove the directory, the lock last: whoever is killed on the way leaves what the next one knows and sweeps.

    Only sockets are removed. A directory that holds anything else is somebody else's, whatever it is called.
    """
    with suppress(OSError):
        found = [each for each in path.iterdir() if each.name != LOCK]
        if all(stat.S_ISSOCK(each.lstat().st_mode) for each in found):
            for each in (*found, path / LOCK):
                each.unlink()
            path.rmdir()


def _root() -> Path:
    """Where the directories lie."""
    root = Path(os.environ.get("XDG_RUNTIME_DIR") or _temporary())
    if not root.is_dir() or len(str(root)) > LONGEST_PATH:
        return Path("/tmp")  # noqa: S108 (the directories made in it are private)
    return root


def _temporary() -> str:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:  # none that can be written: the error in making a directory there says why
        return "/tmp"  # noqa: S108 (as above)


def _make(root: Path) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        try:
            opened = _open_lock(path, os.O_CREAT)
        except OSError:
            path.rmdir()
            raise
        if (lock := _locked(path, opened)) is not None:
            return path, lock


def _take_lock(path: Path) -> int | None:
    """The lock of a directory as an open descriptor, or None where its owner lives or it has none."""
    try:
        opened = _open_lock(path)
    except OSError:
        return None
    return _locked(path, opened)


def _open_lock(path: Path, flags: int = 0) -> int:
    return os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)


def _locked(path: Path, lock: int) -> int | None:
    """Return `lock` when it was free; close it, and return None, where it was not, or a sweeper was faster."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    if not (path / LOCK).exists():
        os.close(lock)
        return None
    return lock
