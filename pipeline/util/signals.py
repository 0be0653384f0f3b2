"""The signals that ask a process to stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import anyio

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, what `kill` and schedulers send, and what a closed terminal or a dropped ssh session sends."""

REPEATED = signal.SIGHUP
"""The kernel and the shell each send it when a terminal closes, so another one does not ask for anything more."""


def handled_stop_signals() -> tuple[signal.Signals, ...]:
    """Return the stop signals without those that this process was started to ignore, as `nohup` does with SIGHUP."""
    return tuple(number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN)


@contextmanager
def cancelled_by_sigterm(scope: anyio.CancelScope) -> Iterator[None]:
    """Cancel `scope` on SIGTERM within the body; after it, SIGTERM ends the process. In the main thread."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, scope.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
