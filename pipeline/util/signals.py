"""The signals that ask a process to stop."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import anyio

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Those of Ctrl-C, of `kill` and schedulers, and of a closed terminal or a dropped ssh session."""

REPEATED = signal.SIGHUP
"""The kernel and the shell each send it when a terminal closes, so another one does not ask for anything more."""


def handled_stop_signals() -> tuple[signal.Signals, ...]:
    """Return the stop signals without those that this process was started to ignore, as `nohup` does with SIGHUP."""
    return tuple(number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN)


@contextmanager
def woken_by_signals() -> Iterator[None]:
    """Wake the event loop at each signal within the body. In the main thread.

    Python calls a handler between two instructions: for a signal that arrives as the loop begins to wait, that is after
    the wait. Where the loop is woken already, as by `add_signal_handler`, that stays.
    """
    received, sent = socket.socketpair()
    with received, sent:
        received.setblocking(False)
        sent.setblocking(False)
        if (before := signal.set_wakeup_fd(sent.fileno(), warn_on_full_buffer=False)) != -1:
            signal.set_wakeup_fd(before, warn_on_full_buffer=False)
            yield
            return
        loop = asyncio.get_running_loop()
        loop.add_reader(received, _drain, received)
        try:
            yield
        finally:
            loop.remove_reader(received)
            if (now := signal.set_wakeup_fd(-1)) != sent.fileno():
                signal.set_wakeup_fd(now, warn_on_full_buffer=False)  # of a handler that was added meanwhile


def _drain(received: socket.socket) -> None:
    with suppress(BlockingIOError):
        received.recv(4096)


@contextmanager
def cancelled_by_sigterm(scope: anyio.CancelScope) -> Iterator[None]:
    """Cancel `scope` on SIGTERM within the body; after it, SIGTERM ends the process. In the main thread."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, scope.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
