"""File descriptors that workers will ask for, held until they are started: too few are an error at the start.

Where they run out in the middle, ZeroMQ ends this process, or a worker knocks at a door that nobody can open. Every
stage holds what its own workers need, so that together they hold what the run needs. Knows no worker.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ..errors import OutOfFileDescriptors

__all__ = ["held"]

EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE})


@contextmanager
def held(count: int, purpose: str) -> Iterator[ExitStack]:
    """Hold `count` file descriptors until what is given is closed, at the latest until the body is left.

    Raises:
        OutOfFileDescriptors: this process, or the machine, has not so many left.
    """
    with ExitStack() as holding:
        for holds in range(count):
            try:
                holding.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            except OSError as error:
                if error.errno not in EXHAUSTED:
                    raise
                raise OutOfFileDescriptors(
                    f"expected {count} more file descriptors for {purpose}, got {holds} ({error.strerror}): raise the "
                    f"limit of open files (ulimit -n), or run fewer workers",
                ) from error
        yield holding
