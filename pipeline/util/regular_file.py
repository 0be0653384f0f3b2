"""Open a file that others may have replaced: a pipe in its place would keep its reader waiting, a device never ends."""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path


def open_regular(path: Path) -> io.BufferedReader:
    """Open the file at `path` to read, without waiting for a writer. Blocks as a disk does.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be opened, or is a folder, a pipe, a device or a socket; the error has the path.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        require_regular(fd, path)
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def require_regular(fd: int, path: Path) -> None:
    """Check that `fd`, opened from `path`, is a file with bytes on a disk.

    Raises:
        OSError: it is a folder, a pipe, a device or a socket.
    """
    mode = os.fstat(fd).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "expected a file", str(path))
