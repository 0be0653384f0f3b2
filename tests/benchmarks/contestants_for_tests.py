"""Contestants that lose records, bring them late, or do nothing, for processes that a test starts."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.contestants.harness import Case, Control, Send
from benchmarks.contestants.mp_queue import connect_queue, serve_queue
from benchmarks.records import Plain

FORGOTTEN = "7"
"""The record that is not sent."""


@contextmanager
def connect_forgetfully(outbox: Any, producer: int) -> Iterator[Send]:
    with connect_queue(outbox, producer) as send:

        def send_most(record: Plain) -> None:
            if record.instance_id != FORGOTTEN:
                send(record)

        yield send_most


@contextmanager
def serve_late(case: Case, control: Control) -> Iterator[tuple[Any, Iterator[Plain | None]]]:
    """Deliver the last records long after their senders have ended, as on a busy machine."""
    with serve_queue(case, control) as (inbox, records):
        yield inbox, _late(records, control)


def _late(records: Iterator[Plain | None], control: Control) -> Iterator[Plain | None]:
    while not control.stopping:
        yield next(records)
    held = [next(records)]
    while multiprocessing.active_children() or held[-1] is not None:
        held.append(next(records))
    yield from [None, None, *held]
    yield from itertools.repeat(None)


def say_who_and_wait() -> None:
    """Produce, and ignore the consumer's end."""
    print(os.getpid(), flush=True)  # noqa: T201 (the test reads it)
    signal.pause()
