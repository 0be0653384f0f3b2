"""The context of a running stage: the ledger, the metrics, and the worker that it is among several.

A context variable, set by the pipeline for each stage's task, so that a stage's signature stays inbox and outbox.
Where no pipeline runs (a test that drives a stage, a plain script) there is a detached context, which works the
same and whose ledger and metrics belong to no run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from ..._schemas import TrajectoryGroup, TrajectoryId
from ..._schemas.bounds import Count, SmallCount
from ..._schemas.choices import check_choice
from ..accounting.end_states import EndState
from ..accounting.end_values import values_of
from ..accounting.ledger import Ledger
from ..accounting.sample import SampleSink
from ..accounting.telemetry import Metrics
from ..util.listeners import Listeners
from .assignment import Assignments
from .schedule import UNBOUNDED, Schedule


@dataclass(frozen=True, slots=True)
class Worker:
    """The worker, among several equal ones, that runs this stage."""

    index: SmallCount = 0
    """0 to count − 1."""
    count: SmallCount = 1
    """Workers that share the work."""
    restart: SmallCount = 0
    """Times that the worker was restarted."""
    on_host: SmallCount = 1
    """Workers of the stage that share the processors of this process."""
    evaluates_from: Count = 0
    """The first optimizer step whose evaluation is not complete: a restarted worker repeats no earlier one."""


class FlushRequest:
    """The request of a source that stages send on all that they hold; one for all stages of a run. See `flush`."""

    def __init__(self) -> None:
        self._requested = False
        self._checks: list[Callable[[], None]] = []
        """The checks of stages that wait for a record and hold some back."""

    def __repr__(self) -> str:
        return (
            f"<FlushRequest: {'requested' if self._requested else 'not requested'}, {len(self._checks)} stages waiting>"
        )

    def request(self) -> None:
        """Ask every stage to send on what it holds, until `withdraw`."""
        self._requested = True
        self.check()

    def withdraw(self) -> None:
        """Let stages hold records back again: more will come."""
        self._requested = False

    def check(self) -> None:
        """Call the checks of waiting stages: a trajectory has ended, so a requested flush may be due for one."""
        if self._requested:
            for check in list(self._checks):
                check()

    @contextmanager
    def checked_by(self, check: Callable[[], None]) -> Iterator[None]:
        """Call `check` now and whenever a requested flush may have become due, until the body ends."""
        self._checks.append(check)
        try:
            if self._requested:
                check()
            yield
        finally:
            self._checks.remove(check)


def _always() -> bool:
    return True


def _unwatched(_: float) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True, slots=True)
class Context:
    """Everything that a stage can use besides its channels."""

    ledger: Ledger = field(default_factory=Ledger)
    metrics: Metrics = field(default_factory=Metrics)
    worker: Worker = Worker()
    assignments: Assignments | None = None
    """The prompts of a worker; None where a source takes them itself."""
    dropped: Counter[EndState] = field(default_factory=Counter)
    """Trajectories that this stage has dropped, by their end state."""
    flush: FlushRequest = field(default_factory=FlushRequest)
    """The request that stages send on all that they hold."""
    holding: list[Callable[[], bool]] = field(default_factory=list)
    """While the stage waits for a record: returns whether it holds some back."""
    sample_sinks: list[SampleSink] = field(default_factory=list)
    """Called with the samples of a step; one list for all stages of a run."""
    nothing_on_the_way: Callable[[], bool] = _always
    """Returns whether every trajectory in flight is in this stage or downstream of it."""
    schedule: Schedule = UNBOUNDED
    """The bound on lag, and the size of a step."""
    all_wait: Callable[[], bool] = _always
    """Returns whether every stage after this one waits for records, the trainer too."""
    tokenizer: Any = None
    """The tokenizer of the tokens, or its `TokenizerIdentity`: the first one that a stage of the pipeline states."""
    evaluation: object | None = None
    """The evaluation that the source of the run does."""
    watch_loop: Callable[[float], AbstractContextManager[None]] = _unwatched
    """Limits the time without the event loop to so many seconds, the bound of the stage on its calls. A worker is ended
    at the limit; in the process of the pipeline the loop is named in a warning. See `loop_watch`."""
    on_sink_returned: Listeners[[]] = field(default_factory=Listeners)
    """Called when the sink has returned; a stage that has any is not cancelled then."""


_context: ContextVar[Context] = ContextVar("penstock")


def current() -> Context:
    """Return the context of the running stage; without one, a detached context that is kept."""
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
    """Record the end of trajectories that a stage does not send on, in the ledger and in the metrics.

    >>> drop([], "filtered", "zero_variance")

    Raises:
        LedgerImbalance: one of them is not in flight.
        InvalidConfig: no such state.
    """
    check_choice("state", state, EndState)
    ids = what if isinstance(what, TrajectoryGroup) else list(what)
    context = current()
    context.ledger.end(ids, state, reason)
    context.dropped[state] += len(ids)
    context.metrics.total(f"dropped/{state}", len(ids))
    if isinstance(what, TrajectoryGroup):
        context.metrics.ended(values_of("dropped", what, context.ledger.step))
