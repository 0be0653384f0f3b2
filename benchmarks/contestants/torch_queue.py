"""torch.multiprocessing: a queue of tensors in shared memory, one file for each tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..records import Plain
from .harness import IN_FLIGHT, Case, Control, Outcome, Send, need, race
from .mp_queue import taken_from

__all__ = ["torch_queue"]


def torch_queue(case: Case) -> Outcome:
    """Send columns as tensors, shared by file name, which is faster here than by file descriptor."""
    return race(case, _serve, _connect)


@contextmanager
def _serve(case: Case, _control: Control) -> Iterator[tuple[Any, Iterator[Plain | None]]]:
    multiprocessing = need("torch.multiprocessing", "torch")
    multiprocessing.set_sharing_strategy("file_system")
    inbox = multiprocessing.get_context("spawn").Queue(IN_FLIGHT * case.producers)
    try:
        yield inbox, (None if record is None else _arrays(record) for record in taken_from(inbox))
    finally:
        inbox.close()


def _arrays(record: Plain) -> Plain:
    return record._replace(columns=[tensor.numpy() for tensor in record.columns])


@contextmanager
def _connect(outbox: Any, _producer: int) -> Iterator[Send]:
    torch = need("torch", "torch")
    torch.multiprocessing.set_sharing_strategy("file_system")

    def send(record: Plain) -> None:
        # A tensor is moved into shared memory permanently, so each is a new copy, as in a real run.
        outbox.put(record._replace(columns=[torch.tensor(column) for column in record.columns]))

    yield send
    outbox.close()
    outbox.join_thread()
