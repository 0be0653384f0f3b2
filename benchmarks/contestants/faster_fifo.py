"""faster-fifo: pickles through a circular buffer in shared memory, guarded by a process-shared mutex."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..records import Plain, trajectory_bytes
from .harness import IDLE_S, IN_FLIGHT, Case, Control, Outcome, Send, need, race

__all__ = ["faster_fifo"]

PUT_TIMEOUT_S = 30.0
"""Bound on waiting for a full queue."""


def faster_fifo(case: Case) -> Outcome:
    """Send records pickled by the queue, and receive several at a time."""
    return race(case, _serve, _connect)


@contextmanager
def _serve(case: Case, _control: Control) -> Iterator[tuple[Any, Iterator[Plain | None]]]:
    module = need("faster_fifo", "faster-fifo")
    nbytes = max(64 * 2**20, 2 * IN_FLIGHT * case.producers * case.group * trajectory_bytes(case.tokens))
    inbox = module.Queue(max_size_bytes=nbytes)
    try:
        yield inbox, _taken_from(inbox)
    finally:
        inbox.close()


def _taken_from(inbox: Any) -> Iterator[Plain | None]:
    while True:
        try:
            yield from inbox.get_many(timeout=IDLE_S)
        except queue.Empty:
            yield None


@contextmanager
def _connect(outbox: Any, _producer: int) -> Iterator[Send]:
    yield lambda record: outbox.put(record, timeout=PUT_TIMEOUT_S)
