"""What surrounds a running stage: the ledger, the metrics, and which of several workers it is.

A context variable, set by the pipeline for each stage's task, so that a stage's signature stays inbox and outbox.
Where no pipeline runs (a stage driven by hand, a script of one's own) there is a detached context: everything works,
nobody listens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from ..schemas import TrajectoryGroup, TrajectoryId
from .ledger import EndState, Ledger
from .telemetry import Metrics

__all__ = ["Context", "Flush", "Worker", "current", "drop", "entered", "outliving_the_sink"]


@dataclass(frozen=True, slots=True)
class Worker:
    """Which of several equal workers runs this stage. Seeds and instance ids are made from it."""

    index: int = 0
    """0 to count − 1."""
    count: int = 1
    """How many workers share the work."""
    restart: int = 0
    """How often the worker was restarted."""


class Flush:
    """Whether a source wants stages to hold nothing back; one for all stages of a run. See `flush`."""

    def __init__(self) -> None:
        self._requested = False
        self._watching: list[Callable[[], None]] = []
        """Looks of the stages that wait for a record and would rather flush."""

    def __repr__(self) -> str:
        return f"<Flush: {'requested' if self._requested else 'not requested'}, {len(self._watching)} stages waiting>"

    def request(self) -> None:
        """Ask every stage to send on what it holds, until `withdraw`."""
        self._requested = True
        self.look()

    def withdraw(self) -> None:
        """Let stages gather again: records come."""
        self._requested = False

    def look(self) -> None:
        """Have those that wait see whether it is their turn: a trajectory has ended, so less is on its way."""
        if self._requested:
            for look in list(self._watching):
                look()

    @contextmanager
    def watched(self, look: Callable[[], None]) -> Iterator[None]:
        """Within the body, call `look` now and whenever a flush that is requested may have become due."""
        self._watching.append(look)
        try:
            if self._requested:
                look()
            yield
        finally:
            self._watching.remove(look)


def _nothing() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Context:
    """What a stage can reach besides its channels."""

    ledger: Ledger = field(default_factory=Ledger)
    metrics: Metrics = field(default_factory=Metrics)
    worker: Worker = Worker()
    dropped: Counter[EndState] = field(default_factory=Counter)
    """What this stage has dropped, by the state that it ended in."""
    flush: Flush = field(default_factory=Flush)
    """Whether stages are to hold nothing back."""
    nothing_on_the_way: Callable[[], bool] = _nothing
    """Whether every trajectory in flight is in this stage or behind it."""
    on_sink_returned: list[Callable[[], None]] = field(default_factory=list)
    """Called, where there are any, instead of cancelling this stage when the sink has returned."""


@contextmanager
def outliving_the_sink(call: Callable[[], None]) -> Iterator[None]:
    """Within the body, have `call` called instead of this stage cancelled when the sink has returned."""
    calls = current().on_sink_returned
    calls.append(call)
    try:
        yield
    finally:
        calls.remove(call)


_context: ContextVar[Context] = ContextVar("penstock")


def current() -> Context:
    """The context of the running stage; a detached one, kept from then on, where there is none."""
    try:
        return _context.get()
    except LookupError:
        context = Context(ledger=Ledger(admits_on_end=True))
        _context.set(context)
        return context


@contextmanager
def entered(context: Context) -> Iterator[Context]:
    """Make `context` current within the body and in every task started there."""
    token = _context.set(context)
    try:
        yield context
    finally:
        _context.reset(token)


def drop(what: TrajectoryGroup | Iterable[TrajectoryId], state: EndState, reason: str) -> None:
    """Say what became of records that a stage does not send on: the ledger counts them, the metrics too.

    >>> drop([], "filtered", "zero_variance")

    Raises:
        LedgerImbalance: one of them is not in flight.
    """
    ids = what if isinstance(what, TrajectoryGroup) else list(what)
    context = current()
    context.ledger.end(ids, state, reason)
    context.dropped[state] += len(ids)
    context.metrics.total(f"dropped/{state}", len(ids))
