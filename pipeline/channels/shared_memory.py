"""Anonymous shared memory: the kernel frees it when the last process that holds it dies.

It is a memfd, sealed so that no holder can shrink what another has mapped (that would be a SIGBUS), and its pages are
allocated before it is used, so that a full machine is an error at the start. Where there is no memfd (an old kernel, a
sandbox that forbids it) it is a file in /dev/shm that was unlinked while it was empty. Such a file cannot be sealed, so
a reader accepts one only where it could have no memfd itself.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from functools import cache
from pathlib import Path

from ..errors import OutOfSharedMemory
from .machine_memory import available_bytes

FOLDER = Path("/dev/shm")  # noqa: S108 (files made there have no name)

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def allocate(nbytes: int, purpose: str, remedy: str) -> int:
    """Return a file descriptor of `nbytes` bytes of allocated shared memory; the caller closes it. Blocks.

    Raises:
        OutOfSharedMemory: the machine, a control group, /dev/shm or a limit of this process has no room for them. The
            message ends with `remedy`.
    """
    wanted = f"expected {nbytes} bytes of shared memory for {purpose}, got none"
    if nbytes > (available := available_bytes()):
        raise OutOfSharedMemory(f"{wanted} ({available} are available): {remedy}")
    fd = scratch(purpose)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        if _has_memfd():
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError as error:
        os.close(fd)
        where = "" if _has_memfd() else f" in {FOLDER}, as this kernel has no memfd"
        raise OutOfSharedMemory(f"{wanted} ({error.strerror}{where}): {remedy}") from error
    return fd


def scratch(name: str) -> int:
    """Return the file descriptor of an empty, anonymous file in memory; the caller closes it.

    Raises:
        OutOfSharedMemory: there is neither a memfd nor a /dev/shm that can be written to.
    """
    if _has_memfd():
        return os.memfd_create(f"penstock: {name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with tempfile.TemporaryFile(dir=FOLDER) as file:
            return os.dup(file.fileno())
    except OSError as error:
        raise OutOfSharedMemory(
            f"expected a memfd or a file in {FOLDER}, got neither ({error.strerror}): allow memfd_create in this "
            f"sandbox, or mount a tmpfs there"
        ) from error


def may_shrink(fd: int) -> bool:
    """Return whether a holder could shrink the file while it is mapped, although this machine could prevent that."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # it lies on a disk
        return True
    return not seals & fcntl.F_SEAL_SHRINK and _has_memfd()


@cache
def _has_memfd() -> bool:
    try:
        os.close(os.memfd_create("penstock", os.MFD_CLOEXEC))
    except (AttributeError, OSError):
        return False
    return True
