"""The signals that ask a process to stop."""

from __future__ import annotations

import signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, what `kill` and schedulers send, and what a closed terminal or a dropped ssh session sends."""

REPEATED = signal.SIGHUP
"""The kernel and the shell each send it when a terminal closes, so another one does not ask for anything more."""


def handled_stop_signals() -> tuple[signal.Signals, ...]:
    """Return the stop signals without those that this process was started to ignore, as `nohup` does with SIGHUP."""
    return tuple(number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN)
