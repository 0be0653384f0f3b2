"""The machine's own limit: one copy in by a writer, one copy out by a reader, each on its own core, nothing else.

No metadata, no Python object a record: what is left when a transport costs nothing. The two take turns, a round of the
ring each, and only their copies are timed: so every byte crosses from one core to the other exactly once, as it does in
a transport. (Left to run freely they chase each other round the ring, and the result jumps by a factor of five.) Two
cores that shared the work evenly would move 2 / (1 / W + 1 / R) records a second, W and R being what each copies.
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

PRIVATE_RECORDS = 64
"""Records that each side has of its own: they stay in its cache, as a batch that is being filled does."""


def copy_limit(nbytes: int, seconds: float) -> float:
    """Records of `nbytes` a second that two cores copy in and out again."""
    ring = _Ring(nbytes)
    context = multiprocessing.get_context("fork")  # nothing runs yet, and an anonymous mapping is inherited
    ours, theirs = context.Pipe()
    writer = context.Process(target=_write_rounds, args=(ring, theirs))
    cores = sorted(os.sched_getaffinity(0))
    writer.start()
    os.sched_setaffinity(0, {cores[-1]})
    try:
        written_s = read_s = rounds = 0.0
        ours.send(True)
        ours.recv()  # the first round of each side only brings its pages in
        ring.read()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            ours.send(True)
            written_s += ours.recv()
            read_s += ring.read()
            rounds += 1
    finally:
        os.sched_setaffinity(0, cores)
        ours.send(False)
        writer.join()
    return 2 * rounds * ring.slots / (written_s + read_s)


class _Ring:
    """A ring of records in shared memory, and a few of one's own."""

    def __init__(self, nbytes: int) -> None:
        self.slots = max(2, RING_BYTES // nbytes)
        self._shared = memoryview(mmap.mmap(-1, self.slots * nbytes))
        self._own = np.ones(PRIVATE_RECORDS * nbytes, np.uint8).data
        spans = [slice(slot * nbytes, (slot + 1) * nbytes) for slot in range(max(self.slots, PRIVATE_RECORDS))]
        self._pairs = [(spans[slot], spans[slot % PRIVATE_RECORDS]) for slot in range(self.slots)]

    def write(self) -> float:
        """Seconds that a round of copies in takes."""
        start = time.perf_counter()
        for there, here in self._pairs:
            self._shared[there] = self._own[here]
        return time.perf_counter() - start

    def read(self) -> float:
        """Seconds that a round of copies out takes."""
        start = time.perf_counter()
        for there, here in self._pairs:
            self._own[here] = self._shared[there]
        return time.perf_counter() - start


def _write_rounds(ring: _Ring, pipe: Connection) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    while pipe.recv():
        pipe.send(ring.write())
