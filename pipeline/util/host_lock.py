"""A lock that one process of this host holds at a time: for files that all of them would make."""

from __future__ import annotations

import hashlib
import os
import stat
import time
from pathlib import Path

import anyio
import anyio.to_thread

from ..._schemas.numbers import finite_number
from ..errors import LockTimedOut, UnsafeLock
from .lock_file import LockFile
from .logger import get_logger
from .os_errors import explaining_os_errors
from .temporary_folder import temporary_folder

TIMEOUT_S = 3600.0
"""Bound on waiting for a lock: the process that holds it may be loading and converting a large model."""

WARN_S = 10.0
"""Time after which a wait is logged, with the process that holds the lock."""

FIRST_RETRY_S, LAST_RETRY_S = 0.05, 1.0
"""The pause before the second attempt, and the longest one: each is twice the one before."""

ELSEWHERE = "set TMPDIR to another folder"

log = get_logger("penstock.host_lock")


def host_lock(purpose: str, *, timeout_s: float = TIMEOUT_S) -> HostLock:
    """Return the lock of this user for `purpose`: one process of this host, and one task of it, holds it at a time.

    `async with` waits for it in a stage's `run`, and can be cancelled; `with` blocks, and is for functions that run in
    threads, such as `make_model` and `prepare`. The kernel releases the lock of a process that dies. Its files may be
    incomplete, so make them under another name:

    >>> import tempfile
    >>> from pathlib import Path
    >>> folder = Path(tempfile.mkdtemp())
    >>> with host_lock("squares"):
    ...     if not (folder / "squares").exists():
    ...         _ = (folder / "squares.part").write_text("0 1 4 9")
    ...         _ = (folder / "squares.part").rename(folder / "squares")
    >>> (folder / "squares").read_text()
    '0 1 4 9'

    The lock is a file in a folder of mode 0700, `penstock-locks-<uid>` in the folder for temporary files, the same for
    all of these processes. A wait of ten seconds is logged with the process that holds the lock.

    Args:
        purpose: a name that all of these processes give.
        timeout_s: bound on the wait.

    Raises:
        InvalidConfig: `timeout_s` is not above 0 and finite.
        LockTimedOut: on entering: another process, or another task of this one, has held it for `timeout_s`.
        UnsafeLock: on entering: its folder belongs to another user or is open to others, or its file is no file.
        NotWritable, DiskFull, OutOfFileDescriptors: on entering: the file cannot be made; the message names its folder.
    """
    return HostLock(purpose, finite_number("timeout_s", timeout_s))


class HostLock:
    """The lock for one purpose, a context manager of both kinds; see `host_lock`."""

    __slots__ = ("_held", "_purpose", "_timeout_s")

    def __init__(self, purpose: str, timeout_s: float) -> None:
        self._purpose = purpose
        self._timeout_s = timeout_s
        self._held: LockFile | None = None
        """The file of the task that holds the lock: others that wait with this object have their own."""

    def __repr__(self) -> str:
        return f"<HostLock: {self._purpose}>"

    def __enter__(self) -> None:
        wait = _Wait(self._opened(), self._purpose, self._timeout_s)
        try:
            while pause_s := wait.attempt():
                time.sleep(pause_s)
        except BaseException:
            wait.lock.close()
            raise
        self._held = wait.lock

    def __exit__(self, *_: object) -> None:
        if self._held is not None:
            self._held.release()

    async def __aenter__(self) -> None:
        wait = _Wait(await anyio.to_thread.run_sync(self._opened), self._purpose, self._timeout_s)
        try:
            while pause_s := await anyio.to_thread.run_sync(wait.attempt):  # noqa: ASYNC110 (it is no event of anyio's)
                await anyio.sleep(pause_s)
        except BaseException:
            wait.lock.close()
            raise
        self._held = wait.lock

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()

    def _opened(self) -> LockFile:
        """Return the lock's file, made if it does not exist."""
        return open_host_lock(hashlib.sha256(self._purpose.encode()).hexdigest()[:16], f"the lock for {self._purpose}")


class _Wait:
    """Attempts to take a lock, from now on."""

    def __init__(self, lock: LockFile, purpose: str, timeout_s: float) -> None:
        self.lock = lock
        self._purpose = purpose
        self._timeout_s = timeout_s
        self._began = time.monotonic()
        self._pause_s = FIRST_RETRY_S
        self._warned = False

    def attempt(self) -> float:
        """Take the lock if it is free, and return 0; else return the seconds until the next attempt.

        Raises:
            LockTimedOut: the time is over.
        """
        if self.lock.take():
            return 0
        waited_s = time.monotonic() - self._began
        if waited_s >= self._timeout_s:
            raise LockTimedOut(
                f"expected the lock for {self._purpose} within {self._timeout_s:g} s, but {self.lock.holder} holds it: "
                f"let that process end or continue, end it, or raise timeout_s"
            )
        if waited_s >= WARN_S and not self._warned:
            self._warned = True
            log.warning("lock_awaited", purpose=self._purpose, holder=self.lock.holder, waited_s=round(waited_s, 1))
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LAST_RETRY_S)
        return min(pause_s, self._timeout_s - waited_s)


def open_host_lock(name: str, what: str) -> LockFile:
    """Return the file `name` in the folder of this user's locks; both are made if they do not exist. Blocks.

    Raises:
        UnsafeLock, NotWritable, DiskFull, OutOfFileDescriptors: see `host_lock`; the message has `what`.
    """
    root = temporary_folder()
    folder = root / f"penstock-locks-{os.getuid()}"
    with explaining_os_errors(what, root, or_else=f"or {ELSEWHERE}", elsewhere=ELSEWHERE):
        _make_private(folder, what)
        path = folder / f"{name}.lock"
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise UnsafeLock(f"expected {path} to be a file for {what}, got a link or a folder: remove it")
        return LockFile(path, mode=0o600)


def _make_private(folder: Path, what: str) -> None:
    """Make `folder` if it does not exist.

    Raises:
        UnsafeLock: it belongs to another user, who could hold the locks in it, or others may write into it.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UnsafeLock(
            f"expected {folder}, for {what}, to be a folder of mode 0700 of user {os.getuid()}, got "
            f"{stat.filemode(found.st_mode)} of user {found.st_uid}: remove it, or {ELSEWHERE}"
        )
