"""A lock that one process of this host holds at a time: for files that all of them would make."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def host_lock(purpose: str) -> Iterator[None]:
    """Hold this user's lock for `purpose` within the body; the kernel releases that of a process that dies. Blocks."""
    name = hashlib.sha256(purpose.encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}-{name}.lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
