"""Measure processor time."""

from __future__ import annotations

from contextlib import suppress

import psutil


def processor_s() -> float:
    """Return the processor time of this process, of those below it and of those of them that have ended, in seconds."""
    total = 0.0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total
