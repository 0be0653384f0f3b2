"""Raise errors of the operating system that a user can fix as one class each, with the path and a remedy.

A full disk, a folder that cannot be written, and exhausted file descriptors can occur in many places: checkpoints,
journals, metrics, weights, sockets. Each place names its operation and the path; the errno values and the advice are
here.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import DiskFull, NotWritable, OutOfFileDescriptors, PenstockError

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The disk, a quota, or the limit on the size of a file is exhausted."""

READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
"""The file system, or the permissions of a folder, do not allow writing."""

EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE})
"""The process, or the machine, has no file descriptor left."""

RAISE_LIMIT = "raise the limit of open files (ulimit -n)"

_RUST_ERROR = re.compile(r"\(os error (\d+)\)")
"""The form in which errors of Rust libraries, such as safetensors, name the error of the operating system."""


@contextmanager
def explaining_os_errors(
    what: str,
    path: Path,
    *,
    disk_full: type[PenstockError] = DiskFull,
    or_else: str = "or choose another folder",
    elsewhere: str = "choose another folder",
) -> Iterator[None]:
    """Raise an error of the operating system in the body as one with a remedy; other errors pass unchanged.

    Args:
        what: the object that the body writes.
        path: the place that it is written to.
        disk_full: the class to raise for a full disk.
        or_else: a remedy besides room on the disk, as the end of the sentence "make room there, …".
        elsewhere: the way to choose another folder, as an imperative.

    Raises:
        DiskFull: the disk, a quota or the limit on the size of a file has no room.
        NotWritable: the file system is read-only, or this user may not write there.
        OutOfFileDescriptors: this process, or the machine, has no file descriptor left.
    """
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        number = _number_of(error)
        reason = os.strerror(number)
        if number in NO_ROOM:
            raise disk_full(
                f"expected room for {what} in {path}, got none ({reason}): make room there, {or_else}"
            ) from error
        if number in READ_ONLY:
            raise NotWritable(
                f"expected to write {what} in {path}, got no permission ({reason}): let this user write there, or "
                f"{elsewhere}"
            ) from error
        if number in EXHAUSTED:
            raise OutOfFileDescriptors(
                f"expected a file descriptor for {what} in {path}, got none ({reason}): {RAISE_LIMIT}"
            ) from error
        raise


def _number_of(error: BaseException | None) -> int:
    """Return the errno of `error` or of one of its causes: torch raises its own error because of that of a file."""
    while error is not None:
        if isinstance(number := getattr(error, "errno", None), int):
            return number
        if (named := _RUST_ERROR.search(str(error))) is not None:
            return int(named[1])
        error = error.__cause__ or error.__context__
    return 0
