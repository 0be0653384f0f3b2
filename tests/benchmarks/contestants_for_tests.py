"""A contestant that loses records, for processes that a test starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.contestants.harness import Send
from benchmarks.contestants.mp_queue import connect_queue
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
