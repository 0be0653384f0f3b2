"""The machine's own limit: one copy in by a writer, one copy out by a reader, each on its own core, nothing else.

No synchronisation, no metadata, no Python object a record: what is left when a transport costs nothing. Two cores that
shared the work evenly would move 2 / (1 / W + 1 / R) records a second, where W and R are what each copies alone.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import time
from multiprocessing.connection import Connection

import numpy as np

__all__ = ["copy_limit"]

RING_BYTES = 16 * 2**20
"""Bytes that writer and reader go round in: what a thousand trajectories take."""


def copy_limit(nbytes: int, seconds: float) -> float:
    """Records of `nbytes` a second that two cores copy in and out again."""
    slots = max(2, RING_BYTES // nbytes)
    shared = mmap.mmap(-1, slots * nbytes)
    context = multiprocessing.get_context("fork")  # nothing runs yet, and an anonymous mapping is inherited
    ours, theirs = context.Pipe()
    writer = context.Process(target=_write, args=(shared, slots, nbytes, seconds, theirs))
    writer.start()
    ours.recv()
    ours.send("go")
    read = _copies(shared, slots, nbytes, seconds, core=1, inward=False)
    written: float = ours.recv()
    writer.join()
    return 2 / (1 / written + 1 / read)


def _write(shared: mmap.mmap, slots: int, nbytes: int, seconds: float, pipe: Connection) -> None:
    pipe.send("ready")
    pipe.recv()
    pipe.send(_copies(shared, slots, nbytes, seconds, core=0, inward=True))


def _copies(shared: mmap.mmap, slots: int, nbytes: int, seconds: float, *, core: int, inward: bool) -> float:
    """Copies a second between a private ring and the shared one."""
    before = os.sched_getaffinity(0)
    cores = sorted(before)
    os.sched_setaffinity(0, {cores[core % len(cores)]})
    try:
        view = memoryview(shared)
        private = np.ones(slots * nbytes, np.uint8).data
        target, origin = (view, private) if inward else (private, view)
        spans = [slice(slot * nbytes, (slot + 1) * nbytes) for slot in range(slots)]
        copied, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            for span in spans:
                target[span] = origin[span]
            copied += slots
        return copied / elapsed
    finally:
        os.sched_setaffinity(0, before)
