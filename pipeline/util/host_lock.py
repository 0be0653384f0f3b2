"""A lock that one process of this host holds at a time: for files that all of them would make."""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
from pathlib import Path

import anyio.to_thread

from .os_errors import explaining_os_errors
from .retry_pace import RetryPace
from .temporary_folder import temporary_folder


def host_lock(purpose: str) -> HostLock:
    """Return the lock of this user for `purpose`, which one process of this host, and one task of it, holds at a time.

    `async with` waits for it in a stage's `run`, and can be cancelled; `with` blocks, and is for functions that run in
    threads, such as `make_model` and `prepare`. The kernel releases the lock of a process that dies. What that one was
    making may be incomplete, so make it under another name:

    >>> import tempfile
    >>> from pathlib import Path
    >>> folder = Path(tempfile.mkdtemp())
    >>> with host_lock("squares"):
    ...     if not (folder / "squares").exists():
    ...         _ = (folder / "squares.part").write_text("0 1 4 9")
    ...         _ = (folder / "squares.part").rename(folder / "squares")
    >>> (folder / "squares").read_text()
    '0 1 4 9'

    The lock is a file in the folder for temporary files, which must be the same for all of these processes. A task that
    takes a lock which it holds waits for ever.

    Raises:
        NotWritable, DiskFull, OutOfFileDescriptors: on entering: the file cannot be made; the message names its folder.
    """
    return HostLock(purpose)


class HostLock:
    """The lock for one purpose, a context manager of both kinds; see `host_lock`."""

    __slots__ = ("_held", "_purpose")

    def __init__(self, purpose: str) -> None:
        self._purpose = purpose
        self._held = -1
        """The descriptor of the task that holds the lock: others, which wait with this object, have their own."""

    def __repr__(self) -> str:
        return f"<HostLock: {self._purpose}>"

    def __enter__(self) -> None:
        fd = self._opened()
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except BaseException:
            os.close(fd)
            raise
        self._held = fd

    def __exit__(self, *_: object) -> None:
        fd = self._held
        fcntl.flock(fd, fcntl.LOCK_UN)  # a process that was forked meanwhile has the descriptor, too
        os.close(fd)

    async def __aenter__(self) -> None:
        fd = await anyio.to_thread.run_sync(self._opened)
        try:
            pace = RetryPace(math.inf)
            while not _taken(fd):
                await pace.wait()
        except BaseException:
            os.close(fd)
            raise
        self._held = fd

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()

    def _opened(self) -> int:
        """Return a descriptor of the lock's file, which is made if it does not exist."""
        folder = temporary_folder()
        name = hashlib.sha256(self._purpose.encode()).hexdigest()[:16]
        other = "set TMPDIR to another folder"
        with explaining_os_errors(f"the lock for {self._purpose}", folder, or_else=f"or {other}", elsewhere=other):
            return open_lock_file(folder, name)


def open_lock_file(folder: Path, name: str) -> int:
    """Return a descriptor of this user's file for a lock, which is made if it does not exist. Blocks.

    Raises:
        OSError: it cannot be made, or is no file.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(folder / f"penstock-{os.getuid()}-{name}.lock", flags, 0o600)


def _taken(fd: int) -> bool:
    """Take the lock of the open file `fd` if it is free; return whether it was."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
