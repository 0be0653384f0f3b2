"""The order in which a worker that has a place reports its events: each once, and no more after its end."""

from __future__ import annotations

from ..errors import ProtocolMismatch
from .worker_messages import Dies, Failed, Finished, Left, Serving, Wants, WorkerEvent

ENDS = (Finished, Failed, Left, Dies)
"""The last event of a worker is one of these."""


class EventOrder:
    """The events that one worker has reported.

    >>> order = EventOrder(has_inbox=False)
    >>> order.check(Finished())
    >>> order.check(Wants())
    Traceback (most recent call last):
    ...
    penstock.errors.ProtocolMismatch: expected no event after Finished, got Wants
    """

    def __init__(self, *, has_inbox: bool) -> None:
        self._has_inbox = has_inbox
        self._reported: set[type[WorkerEvent]] = set()
        self._end = ""
        """The name of its last event."""

    def check(self, event: WorkerEvent) -> None:
        """Record an event.

        Raises:
            ProtocolMismatch: this worker may not report it now.
        """
        kind = type(event)
        if self._end:
            raise ProtocolMismatch(f"expected no event after {self._end}, got {kind.__name__}")
        if isinstance(event, Serving) and not self._has_inbox:
            raise ProtocolMismatch("expected an event of a source's worker, got Serving")
        if kind in self._reported and not isinstance(event, Wants):
            raise ProtocolMismatch(f"expected {kind.__name__} once, got it again")
        self._reported.add(kind)
        self._end = kind.__name__ if isinstance(event, ENDS) else ""
