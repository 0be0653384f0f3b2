"""Account for the trajectories that workers hold: those that they admitted, and those that were sent to them.

A source's worker counts in a page that it shares with this process (`SharedCounters`), so its counts can be read after
it was killed. A middle stage's worker has no counters: the trajectories that are sent to it stay in the ledger of this
process, and the accounting records which worker has which of them.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from ..._schemas import GroupId
from ..._schemas.bounds import MOST_NAMES
from ..._schemas.errors import UNREADABLE
from ..accounting.epoch import UNKNOWN, Epoch
from ..accounting.ledger import Ledger
from ..accounting.repetition_sets import exclude, iter_bits, mask_of, masks_by_group, set_mask, trajectories
from ..accounting.shared_counters import EndState, ReportedCounters, SharedCounters
from ..accounting.telemetry import Metrics, Observations, WaitAggregator, get_logger
from ..channels.heartbeat import UNRESPONSIVE
from ..channels.peer import Peer
from ..channels.shared_memory import scratch
from ..errors import PeerLost, ProtocolMismatch
from ..graph.context import Worker
from ..graph.edge import EdgeCounter
from .worker_messages import Connected, Ending, Joins, WorkerEvent, WorkerReport

log = get_logger("penstock.pipeline")

_decode_report = msgspec.msgpack.Decoder(WorkerReport).decode

RUN_ENDED = "in flight when the run ended"
"""The reason of unfinished trajectories."""

RUN_FAILED = "in flight when the run failed"
"""The reason of trajectories that are lost with a run."""

OnUnresponsive: TypeAlias = Callable[[str, str], None]
"""Kills the process of a worker that is unresponsive: called with its name and the reason."""

OnEvent: TypeAlias = Callable[[Peer, WorkerEvent], None]
"""Handles an event that arrived with the records of a worker."""


@dataclass(slots=True, eq=False)
class _Worker:
    """One process of the stage, until all trajectories that it held are accounted for."""

    counters: SharedCounters | None = None
    """The counters of a source's worker; None for a middle stage."""
    memory: mmap.mmap | None = None
    """The page of the counters; None where they are reported."""
    held: dict[GroupId, int] = field(default_factory=dict)
    """The repetitions of each prompt that were sent to a middle stage's worker and did not return, as a bit mask."""
    reason: str = ""
    """The reason of the process' exit; empty while it runs."""
    epoch: Epoch = UNKNOWN
    """Its progress in an epoch of its prompts."""
    state: EndState = "lost"
    """The end of trajectories that it holds when it has exited."""
    unaccounted_by: str = ""
    """The process, if its stage has returned, so that trajectories that it holds were neither sent nor dropped."""
    drained: bool = False
    """True once every record that it sent was received."""
    version: int | None = None
    """The newest weights with which its last record was sampled."""
    connected: bool = False
    """True if it has reported that its stage begins."""
    place: Worker | None = None
    """Its place, where it has joined."""
    given: int = 0
    """The number of trajectories that it was ever given."""
    foreign: int = 0
    """The number of trajectories that it ended without holding them."""
    metrics: set[str] = field(default_factory=set)
    """The names of its metrics, where it has joined."""

    def take(self, group: GroupId, mask: int) -> int:
        """Remove repetitions from `held`, and return those that were in it."""
        held = self.held.get(group, 0)
        set_mask(self.held, group, held & ~mask)
        return held & mask


class WorkerAccounting:
    """The accounting of the workers of one stage: a `PeerListener` of the channel on which they send."""

    def __init__(
        self,
        ledger: Ledger,
        metrics: Metrics | WaitAggregator,
        counter: EdgeCounter,
        *,
        source: bool,
        assigned: bool = False,
    ) -> None:
        self.on_unresponsive: OnUnresponsive = lambda _worker, _reason: None
        self.on_event: OnEvent = lambda _worker, _event: None
        self.takes: Callable[[Peer], bool] = lambda _worker: True
        """Returns whether what a sender sends is that of a worker: only those that join can be others."""
        self.most_held: float = math.inf
        """The number of groups that a worker which is told what to sample may hold."""
        self.on_room: Callable[[], None] = lambda: None
        """Called when a worker that held so many may hold another one."""
        self._ledger = ledger
        self._metrics = metrics
        self._counter = counter
        self._source = source
        """True for a source, whose workers admit trajectories themselves."""
        self._assigned = assigned
        """True for a source whose workers are told which prompts to sample: their trajectories are `held`."""
        self._workers: dict[str, _Worker] = {}
        self._former_metrics: dict[int, set[str]] = {}
        """The names of the metrics of workers that had joined and ended, by their place."""

    def open(self, worker: str) -> int:
        """Begin to account for `worker`; return the descriptor of a page for its counters, which the caller closes."""
        fd = scratch("counters")
        os.ftruncate(fd, mmap.PAGESIZE)
        self._workers[worker] = opened = _Worker()
        if self._source:
            opened.memory = mmap.mmap(fd, mmap.PAGESIZE)
            self._attach(opened, SharedCounters(opened.memory))
        return fd

    def open_reported(self, worker: str, place: Worker | None = None) -> None:
        """Begin to account for `worker`, which runs where its counters cannot be read, and reports them.

        `place` is that of one that has joined.
        """
        self._workers[worker] = opened = _Worker(place=place)
        if self._source:
            self._attach(opened, ReportedCounters())

    def _attach(self, opened: _Worker, counters: SharedCounters) -> None:
        opened.counters = counters
        counters.step = self._ledger.step
        self._ledger.attach_counters(counters)

    def not_started(self, worker: str) -> None:
        """Record that `worker`, which was opened, could not be started."""
        self.ended(worker, f"{worker} could not be started", connected=False)

    def stepped(self, step: int) -> None:
        """Record the step of the run for workers that are about to begin."""
        for known in self._workers.values():
            if known.counters is not None:
                known.counters.step = step

    def handed(self, worker: str, record: Any) -> None:
        """Record that `record` is being sent to `worker`."""
        for group, mask in masks_by_group(record):
            self.assigned(worker, group, mask)

    def assigned(self, worker: str, group: GroupId, mask: int) -> None:
        """Record that `worker` was told to sample these repetitions of a prompt."""
        known = self._workers[worker]
        known.held[group] = known.held.get(group, 0) | mask
        known.given += mask.bit_count()

    @property
    def evaluates_from(self) -> int:
        """Return the first optimizer step whose evaluation is not complete."""
        return self._metrics.evaluations.completed + 1

    @property
    def groups_held(self) -> int:
        """Return the number of groups that workers hold."""
        return sum(len(known.held) for known in self._workers.values())

    def lag_of(self, worker: str) -> int | None:
        """Return the optimizer steps since the weights of the last record of `worker`; None where it has sent none."""
        known = self._workers.get(worker)
        return None if known is None or known.version is None else self._ledger.step - known.version

    def is_full(self, worker: str) -> bool:
        """Return whether `worker` holds as many groups as it may."""
        known = self._workers.get(worker)
        return known is not None and len(known.held) >= self.most_held

    def returned(self, worker: str, record: Any) -> None:
        """Record that `worker` does not have `record`: it could not be sent, or was returned."""
        if known := self._workers.get(worker):
            self._take(known, masks_by_group(record))

    def _take(self, known: _Worker, taken: Iterable[tuple[GroupId, int]]) -> None:
        """Remove repetitions of groups from what a worker holds."""
        full = len(known.held) >= self.most_held
        for group, mask in taken:
            known.take(group, mask)
        if full and len(known.held) < self.most_held:
            self.on_room()

    def received(self, peer: Peer, record: Any) -> Any:
        """Take a record over from a worker, without the trajectories that the ledger has already.

        See `PeerListener`.

        Raises:
            ProtocolMismatch: the sender has no place among the workers, or was not given these trajectories.
        """
        known = self._workers.get(peer.name)
        if not self.takes(peer):  # it has the key of workers that join, and is none
            raise ProtocolMismatch("expected records of a worker that has a place, got some of another sender")
        if not self._source:
            _check_given(known, record)
            self.returned(peer.name, record)
            if self._assigned:
                self._ledger.succeed(len(record))
        elif copies := self._ledger.take_over(record, peer.ended, known.counters if known else None):
            record = exclude(record, copies)
        if record is not None:
            self._counter.count(record)
            if known is not None and len(record.policy_versions):
                known.version = int(record.policy_versions.max())
        return record

    def observed(self, peer: Peer, payload: bytes) -> None:
        """Merge the report of a worker into the run's metrics and ledger; see `PeerListener`.

        Raises:
            ProtocolMismatch: it is none, or this worker may not send it.
        """
        report, takes = _read(peer, payload), self.takes(peer)
        if not takes and not (report.alone and isinstance(report.event, Joins)):
            raise ProtocolMismatch("expected a request for a place, or the report of a worker that has one")
        known = self._workers.get(peer.name) if takes else None
        if report.observations is not None:
            self._merge(known, report.observations)
        if report.event is not None:
            self._handle(peer, known, report.event)
        if known is not None and not report.alone:
            self._count(known, report)

    def _merge(self, known: _Worker | None, observed: Observations) -> None:
        if known is not None and known.place is not None:
            self._check_observations(known, known.place, observed)
            self._make_room(known, known.place)
        self._metrics.merge(observed)

    def _make_room(self, known: _Worker, place: Worker) -> None:
        """Forget the metrics of those who had a place before, where they and its worker have more than one may."""
        former = self._former_metrics.get(place.index, set())
        if len(former) + len(known.metrics) > MOST_NAMES and len(former | known.metrics) > MOST_NAMES:
            self._metrics.forget(former.difference(*(each.metrics for each in self._workers.values())))
            former.clear()

    def _handle(self, peer: Peer, known: _Worker | None, event: WorkerEvent) -> None:
        self.on_event(peer, event)
        begins = isinstance(event, Connected) and known is not None and not known.connected
        if known is not None and begins and (self._source or self._assigned):
            known.connected = True
            peer.stepped(self._ledger.step, self._ledger.published)  # it could not read the step where it began

    def _count(self, known: _Worker, report: WorkerReport) -> None:
        """Count what has ended in a worker, as it reports."""
        if self._source or self._assigned:
            known.epoch = report.epoch
            self._ledger.epoch = Epoch.of_all([each.epoch for each in self._workers.values()])
        if known.counters is not None:
            known.counters.report(report.counts, {str(state): counts for state, counts in report.reasons.items()})
            self._ledger.ends_changed()
        for ending in report.endings:
            self._end(known, ending)

    def _end(self, known: _Worker, ending: Ending) -> None:
        """End trajectories that a worker holds; a stage that drops one twice, or another one, ends nothing.

        Raises:
            ProtocolMismatch: a worker that has joined names more that it does not hold than it ever held.
        """
        ended = known.held.get(ending.group, 0) & mask_of(ending.repetitions)
        known.foreign += len(ending.repetitions) - ended.bit_count()
        if known.place is not None and known.foreign > known.given:
            raise ProtocolMismatch(
                f"expected ends of trajectories that this worker was given, {known.given} in all, got {known.foreign} "
                "of others"
            )
        if ended:
            self._take(known, [(ending.group, ended)])
            self._ledger.end(trajectories(ending.group, ended), ending.state, ending.reason)

    def _check_observations(self, known: _Worker, place: Worker, observed: Observations) -> None:
        """Check that a worker which has joined has no more metrics than it may, and evaluates its own share.

        Raises:
            ProtocolMismatch: saying what it has.
        """
        known.metrics.update(observed.means, observed.totals, observed.maxima, observed.minima, observed.gauges)
        if len(known.metrics) > MOST_NAMES:
            raise ProtocolMismatch(f"expected at most {MOST_NAMES} metrics of a worker, got {len(known.metrics)}")
        newest = max(self._ledger.step, self._ledger.published or 0)
        for part in observed.evaluations:
            if (part.worker, part.workers) != (place.index, place.count) or part.step > newest:
                raise ProtocolMismatch(
                    f"expected an evaluation of step {newest} or before by worker {place.index} of {place.count}, got "
                    f"one of step {part.step} by worker {part.worker} of {part.workers}"
                )

    def lost(self, peer: Peer, error: PeerLost) -> None:  # noqa: ARG002 (the supervisor has the reason of its exit)
        """Record that all records that a lost worker had published were received; see `PeerListener`."""
        self.closed(peer)
        if peer.unresponsive_s is not None and self.takes(peer):
            self.on_unresponsive(peer.name, UNRESPONSIVE.format(peer.unresponsive_s))

    def closed(self, peer: Peer) -> None:
        """Record that all records that a worker sent before it closed were received; see `PeerListener`."""
        known = self._workers.get(peer.name)
        if known is not None and self.takes(peer):
            known.drained = True
            self._settle(peer.name, known)

    def disconnected(self, peer: Peer) -> None:
        """Do nothing: the supervisor knows when a worker has ended; see `PeerListener`."""

    def ended(self, worker: str, reason: str, *, connected: bool = True, unaccounted_by: str = "") -> None:
        """Record that the process of `worker` ended; trajectories that it still holds are lost, for `reason`.

        A worker that never `connected` sent no records, so no channel reports that all of them were received. If its
        stage has returned, they are `unaccounted_by` that process.
        """
        known = self._workers[worker]
        known.reason, known.drained, known.unaccounted_by = reason, known.drained or not connected, unaccounted_by
        self._settle(worker, known)

    def close(self, state: EndState, reason: str) -> None:
        """End the accounting, for the run is over: what a worker holds ends as `state`, unless the worker has died."""
        for worker, known in list(self._workers.items()):
            # 1. It runs. 2. Its stage has returned, and the run ended before all that it had sent was received.
            if not known.reason or (known.unaccounted_by and not known.drained):
                known.state, known.reason, known.unaccounted_by = state, reason, ""
            known.drained = True
            self._settle(worker, known)

    def _settle(self, worker: str, known: _Worker) -> None:
        """Count the end of what `worker` holds, once its process has ended and its records were received."""
        if not (known.reason and known.drained):
            return
        del self._workers[worker]
        if known.place is not None:
            self._former_metrics.setdefault(known.place.index, set()).update(known.metrics)
        held = [each for group, mask in known.held.items() for each in trajectories(group, mask)]
        self._ledger.end(held, known.state, known.reason)
        count = len(held)
        if known.counters is not None:
            count += self._ledger.detach_counters(known.counters, known.state, known.reason)
        if known.memory is not None:
            known.memory.close()
        if count and known.unaccounted_by:
            self._ledger.unaccounted[known.unaccounted_by] += count
        if count:
            report = log.info if known.reason in {RUN_ENDED, RUN_FAILED} else log.warning  # the worker did not fail
            report(f"trajectories_{known.state}", worker=worker, count=count, reason=known.reason)


def _check_given(known: _Worker | None, record: Any) -> None:
    """Check that a worker which is given its trajectories sends no others.

    Raises:
        ProtocolMismatch: naming the group.
    """
    for group, mask in masks_by_group(record):
        others = mask & ~(0 if known is None else known.held.get(group, 0))
        if others:
            raise ProtocolMismatch(
                f"expected trajectories that this worker was given, got repetitions {list(iter_bits(others))[:8]} of "
                f"{group.env}/{group.instance_id}"
            )


def _read(peer: Peer, payload: bytes) -> WorkerReport:
    try:
        return _decode_report(payload)
    except UNREADABLE as error:
        raise ProtocolMismatch(f"expected the report of a worker from {peer.name}, got {error}") from None
