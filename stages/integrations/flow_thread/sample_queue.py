"""`SampleQueue`: the bounded queue from the flow's event loop to a trainer's `get`."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from ...._schemas import TrajectoryId

Trajectories: TypeAlias = tuple[TrajectoryId, ...]

OnGet: TypeAlias = Callable[[Any, Trajectories], None]

CAPACITY = 2
"""Samples that wait for the trainer: one being sent, one being taken."""


class _Queued(NamedTuple):
    sample: Any
    trajectories: Trajectories


class SampleQueue(queue.Queue[Any]):
    """A queue of the trainer's samples. The event loop offers; one other thread gets.

    Once it is closed and empty, `get` raises `queue.Empty` without waiting: the trainer then asks for its health.
    """

    def __init__(self, capacity: int = CAPACITY, on_get: OnGet | None = None) -> None:
        """Make a queue of `capacity` samples; `on_get` is called with each sample that was taken, before it is used."""
        super().__init__(capacity)
        self._on_get = on_get
        self._closed = False

    def offer(self, sample: Any, trajectories: Trajectories) -> bool:
        """Append a sample of these trajectories, and return whether there was room."""
        try:
            self.put_nowait(_Queued(sample, trajectories))
        except queue.Full:
            return False
        return True

    def close(self, _: BaseException | None = None) -> None:
        """Make `get` raise `queue.Empty` at once when the queue is empty."""
        with self.mutex:
            self._closed = True
            self.not_empty.notify_all()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:  # noqa: FBT001, FBT002 (as in queue.Queue)
        """Return the next sample; see `queue.Queue.get`.

        Raises:
            queue.Empty: no sample came within `timeout`, or the queue is closed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self.not_empty:
            while not self._qsize():
                left = None if deadline is None else deadline - time.monotonic()
                if self._closed or not block or (left is not None and left <= 0):
                    raise queue.Empty
                self.not_empty.wait(left)
            queued: _Queued = self._get()
            self.not_full.notify()
        if self._on_get is not None:
            self._on_get(*queued)
        return queued.sample
