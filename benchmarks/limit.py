"""The machine's own limit: one copy in by a writer, one copy out by a reader, each on its own core.

Without metadata and Python objects, this is the speed of a transport without overhead. The two alternate, a round of
the ring each, and only their copies are timed: so every byte crosses from one core to the other exactly once, as it
does in a transport. (Run concurrently, their results vary by a factor of five.) Two cores that shared the work evenly
would move 2 / (1 / W + 1 / R) records a second, where W and R are the rates of each.

`spin_limit` makes the same copies concurrently, with counters in shared memory on which both spin. It measures the
cost of the cheapest synchronisation, not the limit of the machine.
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
"""Size of the ring: that of a thousand trajectories."""

PRIVATE_BYTES = 64 * 16_704
"""Private memory of each side, which stays in its cache, like a batch that is being filled."""

PRIVATE_RECORDS = 8
"""Minimum number of records in the private memory of each side: a group."""

WRITTEN, READ, STOP = 0, 16, 32
"""Indices of the counters: each has a cache line and the next one, which is prefetched with it."""

WARM_UP_S = 0.2

CHUNK = 32
"""Records between two updates of a counter in `spin_limit`."""


def copy_limit(nbytes: int, seconds: float) -> float:
    """Return records of `nbytes` a second that two cores copy in and out."""
    ring = _Ring(nbytes)
    context = multiprocessing.get_context("fork")  # no threads yet, and an anonymous mapping is inherited
    ours, theirs = context.Pipe()
    writer = context.Process(target=_write_rounds, args=(ring, theirs))
    cores = sorted(os.sched_getaffinity(0))
    writer.start()
    os.sched_setaffinity(0, {cores[-1]})
    try:
        written_s = read_s = rounds = 0.0
        ours.send(True)
        ours.recv()  # the first round of each side faults its pages in
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
    """Return records of `nbytes` a second through a ring, each core spinning on the other's counter."""
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
    """A ring of records in shared memory, and a few private ones."""

    def __init__(self, nbytes: int) -> None:
        self.slots = max(2, RING_BYTES // nbytes)
        self._shared = memoryview(mmap.mmap(-1, self.slots * nbytes))
        private = max(PRIVATE_RECORDS, PRIVATE_BYTES // nbytes)
        self._own = np.ones(private * nbytes, np.uint8).data
        spans = [slice(slot * nbytes, (slot + 1) * nbytes) for slot in range(max(self.slots, private))]
        self._pairs = [(spans[slot], spans[slot % private]) for slot in range(self.slots)]

    def write(self) -> float:
        """Copy in a round; return its time in seconds."""
        start = time.perf_counter()
        for there, here in self._pairs:
            self._shared[there] = self._own[here]
        return time.perf_counter() - start

    def read(self) -> float:
        """Copy out a round; return its time in seconds."""
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
        count = min(CHUNK, ring.slots - written % ring.slots, ring.slots - (written - counters[READ]))
        ring.write_some(written % ring.slots, count)
        written += count
        counters[WRITTEN] = written


def _read_until(ring: _Ring, counters: memoryview, end: float) -> None:
    read = counters[READ]
    while time.perf_counter() < end:
        count = min(CHUNK, ring.slots - read % ring.slots, counters[WRITTEN] - read)
        ring.read_some(read % ring.slots, count)
        read += count
        counters[READ] = read
