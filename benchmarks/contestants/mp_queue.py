"""multiprocessing.Queue: pickles through a pipe, with a feeder thread and two locks."""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..records import Plain
from .harness import IDLE_S, IN_FLIGHT, Case, Control, Outcome, Send, race

__all__ = ["connect_queue", "mp_queue", "serve_queue", "taken_from"]


def mp_queue(case: Case) -> Outcome:
    """Send records pickled by the queue."""
    return race(case, serve_queue, connect_queue)


@contextmanager
def serve_queue(case: Case, _control: Control) -> Iterator[tuple[Any, Iterator[Plain | None]]]:
    """Open the receiving end of a queue."""
    inbox: Any = multiprocessing.get_context("spawn").Queue(IN_FLIGHT * case.producers)
    try:
        yield inbox, taken_from(inbox)
    finally:
        inbox.close()


def taken_from(inbox: Any) -> Iterator[Plain | None]:
    """Yield the records of a queue."""
    while True:
        try:
            yield inbox.get(timeout=IDLE_S)
        except queue.Empty:
            yield None


@contextmanager
def connect_queue(outbox: Any, _producer: int) -> Iterator[Send]:
    """Open the sending end of a queue."""
    yield outbox.put
    outbox.close()
    outbox.join_thread()
