"""A ring of fixed slots in shared memory with pickles in them, as in several frameworks.

Such rings are made for a single writer; with several, records are duplicated and lost without a lock. So there is a
lock here, and only the reader moves the reading end. The reader spins, yielding the processor, then sleeps and polls.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from ..records import Plain, trajectory_bytes
from .harness import IDLE_S, IN_FLIGHT, Case, Control, Outcome, Send, race

__all__ = ["pickle_ring"]

SPIN_S = 0.001
POLL_S = 0.0001


def pickle_ring(case: Case) -> Outcome:
    """Send records pickled into slots."""
    return race(case, _serve, _connect)


class _Ring(NamedTuple):
    memory: Any
    counters: Any
    """Records written, records read."""
    lock: Any
    slots: int
    slot_bytes: int

    def slot(self, number: int) -> memoryview:
        """Return the slot of record `number`."""
        first = number % self.slots * self.slot_bytes
        return memoryview(self.memory).cast("B")[first : first + self.slot_bytes]


@contextmanager
def _serve(case: Case, _control: Control) -> Iterator[tuple[Any, Iterator[Plain | None]]]:
    context = multiprocessing.get_context("spawn")
    slot_bytes = case.group * (trajectory_bytes(case.tokens) + case.tokens) + 4096
    slots = IN_FLIGHT * case.producers
    memory = context.RawArray(ctypes.c_char, slots * slot_bytes)
    ring = _Ring(memory, context.RawArray(ctypes.c_int64, 2), context.Lock(), slots, slot_bytes)
    yield ring, _taken_from(ring)


def _taken_from(ring: _Ring) -> Iterator[Plain | None]:
    counters, read, idle_since = ring.counters, 0, time.perf_counter()
    while True:
        if counters[0] > read:
            yield pickle.loads(ring.slot(read))  # noqa: S301 (what such rings do)
            read += 1
            counters[1] = read
            idle_since = time.perf_counter()
        elif (idle := time.perf_counter() - idle_since) < SPIN_S:
            os.sched_yield()
        else:
            time.sleep(POLL_S)
            if idle > IDLE_S:
                yield None
                idle_since = time.perf_counter() - SPIN_S


@contextmanager
def _connect(ring: _Ring, _producer: int) -> Iterator[Send]:
    def send(record: Plain) -> None:
        pickled = pickle.dumps(record, pickle.HIGHEST_PROTOCOL)
        with ring.lock:
            written = ring.counters[0]
            while written - ring.counters[1] >= ring.slots:
                time.sleep(POLL_S)
            ring.slot(written)[: len(pickled)] = pickled
            ring.counters[0] = written + 1

    yield send
