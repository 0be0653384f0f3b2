"""Reserve file descriptors that are about to be needed: too few are an error at the start.

Where they run out later, ZeroMQ ends this process, or the connection of a worker cannot be accepted. Every stage
reserves those of its own workers, so that together they reserve those of the run. Knows neither workers nor sockets.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ..errors import OutOfFileDescriptors
from .os_errors import EXHAUSTED, RAISE_LIMIT


@contextmanager
def reserved(count: int, purpose: str, advice: str = "") -> Iterator[ExitStack]:
    """Reserve `count` file descriptors until the stack that is returned is closed, at the latest until the body ends.

    Args:
        count: number of descriptors.
        purpose: their later use, for the message.
        advice: a remedy besides a higher limit, as the end of the message.

    Raises:
        OutOfFileDescriptors: this process, or the machine, has not so many left.
    """
    with ExitStack() as stack:
        for opened in range(count):
            try:
                stack.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            except OSError as error:
                if error.errno not in EXHAUSTED:
                    raise
                raise OutOfFileDescriptors(
                    f"expected {count} more file descriptors for {purpose}, got {opened} ({error.strerror}): "
                    f"{RAISE_LIMIT}{advice}"
                ) from error
        yield stack


def available(count: int, purpose: str) -> None:
    """Check that `count` file descriptors are available.

    Raises:
        OutOfFileDescriptors: they cannot.
    """
    with reserved(count, purpose):
        pass
