"""The processes of penstock's workers, found by what they run: a folder may be called penstock too."""

from __future__ import annotations

from contextlib import suppress

import psutil

RUNS = "; from penstock."
"""Stands in the command of every worker."""


def worker_processes() -> list[int]:
    """Return the processes of penstock's workers that this process, or one that it started, has started."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended, as those of Ray do
            if any(RUNS in part for part in child.cmdline()):
                found.append(child.pid)
    return found
