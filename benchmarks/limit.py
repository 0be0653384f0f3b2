"""The machine's own limit: one copy in by a writer, one copy out by a reader, each on its own core, nothing else.

No metadata, no Python object a record: what is left when a transport costs nothing. The two take turns, a round of the
ring each, and only their copies are timed: so every byte crosses from one core to the other exactly once, as it does in
a transport. (Left to run freely they chase each other round the ring, and the result jumps by a factor of five.) Two
cores that shared the work evenly would move 2 / (1 / W + 1 / R) records a second, W and R being what each copies.

`spin_limit` is there for insight: the same copies by two that do run freely, and hand over by counters in shared memory
on which both spin. It says what the cheapest handing over costs, not what the machine can do.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import time
from multiprocessing.connection import Connection

import numpy as np

__all__ = ["copy_limit", "spin_limit"]

RING_BYTES = 16 * 2**20
"""Bytes that writer and reader go round in: what a thousand trajectories take."""

PRIVATE_BYTES = 64 * 16_704
"""Bytes that each side has of its own: they stay in its cache, as a batch that is being filled does."""

PRIVATE_RECORDS = 8
"""Records that each side has of its own at least, however long they are: a group."""

WRITTEN, READ, STOP = 0, 16, 32
"""Where the counters stand on which two spin: each has a cache line, and the next, which is fetched with it."""

WARM_UP_S = 0.2

HAND_OVER = 32
"""Records that are handed over at a time, where the hand-over is measured as well."""


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


def spin_limit(nbytes: int, seconds: float) -> float:
    """Records of `nbytes` a second that two cores hand over through a ring, each spinning on the other's counter."""
    ring = _Ring(nbytes)
    counters = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")
    writer = multiprocessing.get_context("fork").Process(target=_write_freely, args=(ring, counters))
    cores = sorted(os.sched_getaffinity(0))
    writer.start()
    os.sched_setaffinity(0, {cores[-1]})
    try:
        _read_until(ring, counters, time.perf_counter() + min(WARM_UP_S, seconds))
        begin, first = time.perf_counter(), counters[READ]
        _read_until(ring, counters, begin + seconds)
        return (counters[READ] - first) / (time.perf_counter() - begin)
    finally:
        os.sched_setaffinity(0, cores)
        counters[STOP] = 1
        writer.join()


class _Ring:
    """A ring of records in shared memory, and a few of one's own."""

    def __init__(self, nbytes: int) -> None:
        self.slots = max(2, RING_BYTES // nbytes)
        self._shared = memoryview(mmap.mmap(-1, self.slots * nbytes))
        private = max(PRIVATE_RECORDS, PRIVATE_BYTES // nbytes)
        self._own = np.ones(private * nbytes, np.uint8).data
        spans = [slice(slot * nbytes, (slot + 1) * nbytes) for slot in range(max(self.slots, private))]
        self._pairs = [(spans[slot], spans[slot % private]) for slot in range(self.slots)]

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

    def write_some(self, first: int, count: int) -> None:
        """Copy in `count` records from slot `first` on."""
        for there, here in self._pairs[first : first + count]:
            self._shared[there] = self._own[here]

    def read_some(self, first: int, count: int) -> None:
        """Copy out `count` records from slot `first` on."""
        for there, here in self._pairs[first : first + count]:
            self._own[here] = self._shared[there]


def _write_rounds(ring: _Ring, pipe: Connection) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    while pipe.recv():
        pipe.send(ring.write())


def _write_freely(ring: _Ring, counters: memoryview) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    written = 0
    while not counters[STOP]:
        count = min(HAND_OVER, ring.slots - written % ring.slots, ring.slots - (written - counters[READ]))
        ring.write_some(written % ring.slots, count)
        written += count
        counters[WRITTEN] = written


def _read_until(ring: _Ring, counters: memoryview, end: float) -> None:
    read = counters[READ]
    while time.perf_counter() < end:
        count = min(HAND_OVER, ring.slots - read % ring.slots, counters[WRITTEN] - read)
        ring.read_some(read % ring.slots, count)
        read += count
        counters[READ] = read
