"""Ctrl-C, from a script's first line to its last: it ends the run in a sentence, never in a traceback.

Python raises KeyboardInterrupt wherever it happens to be: in the middle of an import, of a destructor (and there it is
lost), of a file that is being written. Here it does not. As long as there is nothing to keep, Ctrl-C ends the process;
once there is, it cancels a scope, which takes effect only where the run waits.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import anyio

__all__ = ["INTERRUPTED", "cancelled_by_ctrl_c", "end_on_ctrl_c"]

INTERRUPTED = 130
"""What a program that Ctrl-C ended exits with, by custom."""

STDOUT = 1


def end_on_ctrl_c(last_words: str) -> None:
    """From now on, Ctrl-C prints `last_words` and ends the process at once: for when there is nothing to keep."""

    def end(*_: object) -> None:
        with suppress(OSError):
            os.write(STDOUT, f"\n{last_words}\n".encode())
        os._exit(INTERRUPTED)  # an exception would be lost where what is being imported calls back

    signal.signal(signal.SIGINT, end)


@contextmanager
def cancelled_by_ctrl_c() -> Iterator[anyio.CancelScope]:
    """Within the body, Ctrl-C cancels it, and a second one changes nothing; after it, the script exits with 130."""
    import asyncio  # noqa: PLC0415 (this module is imported before Ctrl-C is provided for, so it is quick)

    import anyio  # noqa: PLC0415 (likewise)

    loop = asyncio.get_running_loop()
    pressed = False
    with anyio.CancelScope() as scope:

        def cancel(*_: object) -> None:
            nonlocal pressed
            pressed = True
            loop.call_soon_threadsafe(scope.cancel)

        before = signal.signal(signal.SIGINT, cancel)
        try:
            yield scope
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN if pressed else before)
    if pressed:
        gc.freeze()  # or the interpreter searches all of torch for garbage before it exits, which takes a second
        sys.exit(INTERRUPTED)
