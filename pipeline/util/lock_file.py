"""A lock on a file, for one process at a time. The kernel releases it when the process ends.

It is a lock of an open file (fcntl(2), F_OFD_SETLK). It works on NFS, can be taken on single bytes of the file, and can
be looked at without being taken. The file has the number of the process that took it last.
"""

from __future__ import annotations

import fcntl
import os
import platform
import struct
from contextlib import suppress
from pathlib import Path

from .regular_file import require_regular

LONGEST_NAME = 512
"""Bytes that are read of a file's content: another program may have written it."""

_FLOCK = struct.Struct("hhqqi4x")
"""struct flock: type, whence, first byte, number of bytes (0 for all), and a process, unused by these locks."""


class LockFile:
    """A file that is open to be locked; see the module."""

    __slots__ = ("_fd", "path")

    def __init__(self, path: Path, *, create: bool = True, mode: int = 0o666) -> None:
        """Open the file at `path`; a new one has `mode`. Blocks.

        Raises:
            FileNotFoundError: there is none, and `create` is false.
            OSError: it cannot be opened, or is a link, a folder or anything else but a file.
        """
        self.path = path
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_CREAT if create else 0)
        self._fd = os.open(path, flags, mode)
        try:
            require_regular(self._fd, path)
        except OSError:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<LockFile {self.path}: {'open' if self._fd >= 0 else 'closed'}>"

    def take(self, byte: int | None = None) -> bool:
        """Take the lock of the file, or of one `byte` of it, if it is free; return whether it was.

        Raises:
            OSError: the file system has no locks.
        """
        first, count = (0, 0) if byte is None else (byte, 1)
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, count, 0))
        except (BlockingIOError, PermissionError):  # either says that another one has it
            return False
        if byte is None:
            self._sign()
        return True

    @property
    def holder(self) -> str:
        """Return the process that took the lock last, as text: `process 17 (python train.py)`."""
        with suppress(OSError, ValueError):
            pid, host, *_ = os.pread(self._fd, LONGEST_NAME, 0).decode(errors="replace").split("\n")
            return _named(int(pid), host)
        return "another process"

    def release(self) -> None:
        """Release the lock and close the file. A process that was forked meanwhile has its descriptor, too."""
        with suppress(OSError):
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))
        self.close()

    def close(self) -> None:
        """Close the file; this releases the lock unless a forked process still has its descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _sign(self) -> None:
        """Write the name of this process: a full disk only costs others a name in a message."""
        with suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n{platform.node()}\n".encode(), 0)


def is_locked(path: Path) -> bool:
    """Return whether a process has locked the whole file at `path`. Opens the file only to read; blocks.

    Raises:
        OSError: there is no such file, or it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
    finally:
        os.close(fd)
    return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)


def _named(pid: int, host: str) -> str:
    """Return the name of a process, with its command if it is one of this host that can be looked at."""
    if host != platform.node():
        return f"process {pid} of {''.join(filter(str.isprintable, host))}"
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        *_, after_the_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return f"process {pid}"
    stopped = "the stopped " if after_the_name.split()[0] in "Tt" else ""
    return f"{stopped}process {pid} ({''.join(filter(str.isprintable, command))[:LONGEST_NAME]})"
