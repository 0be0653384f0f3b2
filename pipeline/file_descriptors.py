"""File descriptors that are about to be needed, held until then: too few are an error at the start.

Where they run out in the middle, ZeroMQ ends this process, or a worker knocks at a door that nobody can open. Every
stage holds what its own workers need, so that together they hold what the run needs. Knows neither workers nor sockets.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from .errors import OutOfFileDescriptors
from .os_errors import EXHAUSTED, RAISE_LIMIT

__all__ = ["available", "held"]


@contextmanager
def held(count: int, purpose: str, advice: str = "") -> Iterator[ExitStack]:
    """Hold `count` file descriptors until what is given is closed, at the latest until the body is left.

    Args:
        count: how many.
        purpose: what will need them, for the message.
        advice: what helps besides a higher limit, as the end of the message.

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
                    f"expected {count} more file descriptors for {purpose}, got {holds} ({error.strerror}): "
                    f"{RAISE_LIMIT}{advice}"
                ) from error
        yield holding


def available(count: int, purpose: str) -> None:
    """Check that `count` file descriptors can be opened.

    Raises:
        OutOfFileDescriptors: they cannot.
    """
    with held(count, purpose):
        pass
