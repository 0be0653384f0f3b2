"""What workers hold, in the books of the run: what they admitted, what was handed to them, what was lost with them.

A source's worker keeps its own counters in a page that it shares with this process (`ledger.SharedCounters`), so that
they can be read after it was killed. A middle stage's worker keeps none: the trajectories that are handed to it stay in
the books of this process, and here is noted which of them are with whom.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import msgspec

from ...schemas import GroupId, TrajectoryId
from ...schemas.errors import UNREADABLE
from ..channels.heartbeat import UNRESPONSIVE
from ..channels.peer import Peer
from ..channels.remote_receiver import PeerListener
from ..channels.shared_memory import scratch
from ..edge import EdgeCounter, trajectories_of
from ..errors import PeerLost, ProtocolMismatch
from ..ledger import Ledger
from ..repetition_sets import exclude
from ..telemetry import MetricsReceiver, get_logger
from .shared_counters import SharedCounters
from .worker_messages import WorkerReport

__all__ = ["RelayAccounting", "SourceAccounting", "WorkerListener"]

log = get_logger("penstock.pipeline")

_decode_report = msgspec.msgpack.Decoder(WorkerReport).decode

RUN_ENDED = "in flight when the run ended"

OnUnresponsive: TypeAlias = Callable[[str, str], None]
"""Is told of a worker that is lost and still there, and why: whoever started it ends it."""


class WorkerListener(PeerListener, Protocol):
    """Who is told what happens to workers and to what they hold."""

    def open(self, worker: str) -> int:
        """`worker` is about to be started; returns a page for its counters as a descriptor that the caller closes."""
        ...

    def ended(self, worker: str, how: str, *, connected: bool = True) -> None:
        """`worker` is no more; `how` is the reason for which all that it still holds is lost.

        One that never `connected` sent nothing, and no channel will tell that everything of it was received.
        """
        ...

    def close(self, reason: str = RUN_ENDED) -> None:
        """The run is over: what any worker still holds is lost."""
        ...


@dataclass(slots=True, eq=False)
class _ExitState:
    """What a worker holds can be settled when two things are known, in whichever order they come."""

    how: str = ""
    """How the worker ended; empty while it runs."""
    drained: bool = False
    """Whether everything was received that it sent."""

    @property
    def settled(self) -> bool:
        return bool(self.how) and self.drained


@dataclass(slots=True, eq=False)
class _SharedCounters(_ExitState):
    """The counters of a source's worker."""

    account: SharedCounters = field(kw_only=True)
    memory: mmap.mmap = field(kw_only=True)


class SourceAccounting:
    """The books of a source's workers."""

    def __init__(self, ledger: Ledger, metrics: MetricsReceiver, counter: EdgeCounter) -> None:
        self._ledger = ledger
        self._metrics = metrics
        self._counter = counter
        self._pages: dict[str, _SharedCounters] = {}
        self.on_unresponsive: OnUnresponsive = _unheeded

    def open(self, worker: str) -> int:
        """A page for the counters of `worker`; see `WorkerListener.open`."""
        fd = _page()
        memory = mmap.mmap(fd, mmap.PAGESIZE)
        page = _SharedCounters(account=SharedCounters(memory, worker), memory=memory)
        self._pages[worker] = page
        self._ledger.open_account(page.account)
        return fd

    def received(self, peer: Peer, record: Any) -> Any:
        """Trajectories cross into the books of this process, except for copies; see `PeerListener`."""
        page = self._pages.get(peer.name)
        if copies := self._ledger.take_over(record, peer.ended, page.account if page else None):
            record = exclude(record, copies)
        if record is not None:
            self._counter.count(record)
        return record

    def observed(self, peer: Peer, payload: bytes) -> None:
        """A worker's metrics and reasons join those of the run; see `PeerListener`."""
        report = _read(peer, payload)
        if report.observations is not None:
            self._metrics.merge(report.observations)
        if page := self._pages.get(peer.name):
            page.account.reasons = report.reasons
            self._ledger.failures_changed()

    def lost(self, peer: Peer, error: PeerLost) -> None:  # noqa: ARG002 (the parent knows better how it died)
        """Everything was received that a lost worker had published; see `PeerListener`."""
        self.parted(peer)
        if peer.unresponsive_s is not None:
            self.on_unresponsive(peer.name, UNRESPONSIVE.format(peer.unresponsive_s))

    def parted(self, peer: Peer) -> None:
        """Everything was received that a worker sent before it said goodbye; see `PeerListener`."""
        if page := self._pages.get(peer.name):
            page.drained = True
            self._settle(peer.name, page)

    def departed(self, peer: Peer) -> None:
        """Its parent knows when a worker is gone; see `PeerListener`."""

    def ended(self, worker: str, how: str, *, connected: bool = True) -> None:
        """A worker is no more; see `WorkerListener.ended`."""
        page = self._pages[worker]
        page.how, page.drained = how, page.drained or not connected
        self._settle(worker, page)

    def close(self, reason: str = RUN_ENDED) -> None:
        """The run is over; see `WorkerListener.close`."""
        for worker, page in list(self._pages.items()):
            page.how, page.drained = page.how or reason, True
            self._settle(worker, page)

    def _settle(self, worker: str, page: _SharedCounters) -> None:
        if page.settled:
            del self._pages[worker]
            _warn(worker, self._ledger.close_account(page.account, page.how), page.how)
            page.memory.close()


@dataclass(slots=True, eq=False)
class _InFlight(_ExitState):
    """What is with the worker of a middle stage."""

    held: dict[GroupId, set[int]] = field(default_factory=dict)
    """The repetitions of each prompt."""

    def take(self, group: GroupId, repetitions: Iterable[int]) -> set[int]:
        """Note that these are not here any more; returns those that were."""
        held = self.held.get(group, set())
        taken = held.intersection(repetitions)
        held -= taken
        if not held:
            self.held.pop(group, None)
        return taken

    @property
    def ids(self) -> list[TrajectoryId]:
        """All that is held."""
        return [TrajectoryId(*group, repetition) for group, held in self.held.items() for repetition in held]


class RelayAccounting:
    """The books of a middle stage's workers."""

    def __init__(self, ledger: Ledger, metrics: MetricsReceiver, counter: EdgeCounter) -> None:
        self._ledger = ledger
        self._metrics = metrics
        self._counter = counter
        self._workers: dict[str, _InFlight] = {}
        self.on_unresponsive: OnUnresponsive = _unheeded

    def open(self, worker: str) -> int:
        """Note that `worker` begins, with empty hands; see `WorkerListener.open`."""
        self._workers[worker] = _InFlight()
        return _page()

    def handed(self, worker: str, record: Any) -> None:
        """`record` is on its way to `worker`."""
        for group, repetitions in trajectories_of(record):
            self._workers[worker].held.setdefault(group, set()).update(repetitions)

    def returned(self, worker: str, record: Any) -> None:
        """`record` is not with `worker`: it could not be handed over, or came back."""
        if hands := self._workers.get(worker):
            for group, repetitions in trajectories_of(record):
                hands.take(group, repetitions)

    def received(self, peer: Peer, record: Any) -> Any:
        """A worker is done with `record`; see `PeerListener`."""
        self.returned(peer.name, record)
        self._counter.count(record)
        return record

    def observed(self, peer: Peer, payload: bytes) -> None:
        """A worker's metrics and endings join those of the run; see `PeerListener`."""
        report = _read(peer, payload)
        if report.observations is not None:
            self._metrics.merge(report.observations)
        if hands := self._workers.get(peer.name):
            for ending in report.endings:
                taken = hands.take(ending.group, ending.repetitions)
                self._ledger.end([TrajectoryId(*ending.group, r) for r in taken], ending.state, ending.reason)

    def lost(self, peer: Peer, error: PeerLost) -> None:  # noqa: ARG002 (the parent knows better how it died)
        """Everything was received that a lost worker had published; see `PeerListener`."""
        self.parted(peer)
        if peer.unresponsive_s is not None:
            self.on_unresponsive(peer.name, UNRESPONSIVE.format(peer.unresponsive_s))

    def parted(self, peer: Peer) -> None:
        """Everything was received that a worker sent before it said goodbye; see `PeerListener`."""
        if hands := self._workers.get(peer.name):
            hands.drained = True
            self._settle(peer.name, hands)

    def departed(self, peer: Peer) -> None:
        """Its parent knows when a worker is gone; see `PeerListener`."""

    def ended(self, worker: str, how: str, *, connected: bool = True) -> None:
        """A worker is no more; see `WorkerListener.ended`."""
        hands = self._workers[worker]
        hands.how, hands.drained = how, hands.drained or not connected
        self._settle(worker, hands)

    def close(self, reason: str = RUN_ENDED) -> None:
        """The run is over; see `WorkerListener.close`."""
        for worker, hands in list(self._workers.items()):
            hands.how, hands.drained = hands.how or reason, True
            self._settle(worker, hands)

    def _settle(self, worker: str, hands: _InFlight) -> None:
        if hands.settled:
            del self._workers[worker]
            self._ledger.end(hands.ids, "lost", hands.how)
            _warn(worker, len(hands.ids), hands.how)


def _unheeded(worker: str, why: str) -> None:
    """Nobody looks after the workers."""


def _page() -> int:
    fd = scratch("account")
    os.ftruncate(fd, mmap.PAGESIZE)
    return fd


def _read(peer: Peer, payload: bytes) -> WorkerReport:
    try:
        return _decode_report(payload)
    except UNREADABLE as error:
        raise ProtocolMismatch(f"expected the news of a worker from {peer.name}, got {error}") from None


def _warn(worker: str, lost: int, reason: str) -> None:
    if lost:
        tell = log.info if reason == RUN_ENDED else log.warning  # what was in flight at the end is no cause for concern
        tell("trajectories_lost", worker=worker, count=lost, reason=reason)
