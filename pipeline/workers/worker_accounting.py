"""Account for the trajectories that workers hold: those that were assigned, or sent, to them.

All of them are in flight in the run's ledger, so the death of a worker loses no count. Trajectories of a source whose
prompts are not assigned are admitted when their record arrives, or when their worker reports their end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from ..._schemas import GroupId
from ..._schemas.bounds import MOST_NAMES
from ..._schemas.errors import UNREADABLE
from ..accounting.end_states import EndState
from ..accounting.epoch import UNKNOWN, Epoch
from ..accounting.ledger import Ledger
from ..accounting.repetition_sets import exclude, iter_bits, mask_of, masks_by_group, set_mask, trajectories
from ..accounting.telemetry import Metrics, Observations, WaitAggregator, get_logger
from ..channels.heartbeat import UNRESPONSIVE
from ..channels.peer import Peer
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


Returned: TypeAlias = Callable[[GroupId, int], bool]
"""Takes back repetitions that a worker held when it died, as a bit mask; returns whether they are assigned again."""


@dataclass(slots=True, eq=False)
class _Worker:
    """One start of a worker, until all trajectories that it held are accounted for."""

    place: Worker
    held: dict[GroupId, int] = field(default_factory=dict)
    """The repetitions of each prompt that it was given and that did not return, as a bit mask."""
    reason: str = ""
    """The reason of its end; empty while it runs."""
    epoch: Epoch = UNKNOWN
    """Its progress in an epoch of its prompts."""
    unaccounted_by: str = ""
    """The process, if its stage has returned, so that trajectories that it holds were neither sent nor dropped."""
    drained: bool = False
    """True once every record that it sent was received."""
    version: int | None = None
    """The newest weights that sampled its last record."""
    connected: bool = False
    """True if it has reported that its stage begins."""
    given: int = 0
    """The number of trajectories that it was ever given."""
    foreign: int = 0
    """The number of trajectories that it ended without holding them."""
    metrics: set[str] = field(default_factory=set)
    """The names of its metrics."""

    def take(self, group: GroupId, mask: int) -> int:
        """Remove repetitions from `held`, and return those that were in it."""
        held = self.held.get(group, 0)
        set_mask(self.held, group, held & ~mask)
        return held & mask


class WorkerAccounting:
    """The accounting of the workers of one stage: a `PeerListener` of the channel that they send on."""

    def __init__(
        self,
        ledger: Ledger,
        metrics: Metrics | WaitAggregator,
        counter: EdgeCounter,
        *,
        source: bool,
        assigned: bool = False,
    ) -> None:
        """Account for the workers of a stage.

        Args:
            ledger: of the run.
            metrics: receives theirs.
            counter: counts their records.
            source: true if the stage is a source.
            assigned: true if its workers are assigned their prompts.
        """
        self.on_unresponsive: OnUnresponsive = lambda _worker, _reason: None
        self.on_event: OnEvent = lambda _worker, _event: None
        self.takes: Callable[[Peer], bool] = lambda _worker: True
        """Returns whether a sender is a worker with a place."""
        self.most_held: float = math.inf
        """The number of groups that a worker with assigned prompts may hold."""
        self.on_taken: Callable[[], None] = lambda: None
        """Called when a worker holds less than before."""
        self.on_returned: Returned = lambda _group, _mask: False
        self._ledger = ledger
        self._metrics = metrics
        self._counter = counter
        self._source = source
        self._assigned = assigned
        self._workers: dict[str, _Worker] = {}
        self._former_metrics: dict[int, set[str]] = {}
        """The names of the metrics of workers that have ended, by their place."""

    def open(self, worker: str, place: Worker) -> None:
        """Begin to account for `worker`."""
        self._workers[worker] = _Worker(place)

    def not_started(self, worker: str) -> None:
        """Record that `worker` was opened, and could not be started."""
        self.ended(worker, f"{worker} could not be started", connected=False)

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
        """Return the optimizer steps since the weights of the last record of `worker`; None before that."""
        known = self._workers.get(worker)
        return None if known is None or known.version is None else self._ledger.step - known.version

    def has_room(self, worker: str) -> bool:
        """Return whether `worker` may hold another group."""
        known = self._workers.get(worker)
        return known is not None and not known.reason and len(known.held) < self.most_held

    def held_by(self, worker: str) -> int:
        """Return the number of groups that `worker` holds."""
        return len(self._workers[worker].held)

    def returned(self, worker: str, record: Any) -> None:
        """Record that `worker` does not have `record`: it could not be sent, or was returned."""
        if known := self._workers.get(worker):
            self._take(known, masks_by_group(record))

    def _take(self, known: _Worker, taken: Iterable[tuple[GroupId, int]]) -> None:
        """Remove repetitions of groups from those that a worker holds."""
        for group, mask in taken:
            known.take(group, mask)
        self.on_taken()

    def received(self, peer: Peer, record: Any) -> Any:
        """Take a record over from a worker, without the trajectories that the ledger has already.

        See `PeerListener`.

        Raises:
            ProtocolMismatch: the sender has no place among the workers, or was not given these trajectories.
        """
        known = self._workers.get(peer.name)
        if known is None or not self.takes(peer):
            raise ProtocolMismatch("expected records of a worker that has a place, got some of another sender")
        if self._assigned or not self._source:
            _check_given(known, record)
            self.returned(peer.name, record)
        elif copies := self._ledger.hand_over(record):
            record = exclude(record, copies)
        if record is not None:
            self._counter.count(record)
            if len(record.policy_versions):
                known.version = int(record.policy_versions.max())
        return record

    def observed(self, peer: Peer, payload: bytes) -> None:
        """Merge the report of a worker into the run's metrics and ledger; see `PeerListener`.

        Raises:
            ProtocolMismatch: it is malformed, or this worker may not send it.
        """
        report, takes = _read(peer, payload), self.takes(peer)
        if not takes and not (report.alone and isinstance(report.event, Joins)):
            raise ProtocolMismatch("expected a request for a place, or the report of a worker that has one")
        known = self._workers.get(peer.name) if takes else None
        if known is not None and report.observations is not None:
            self._merge(known, report.observations)
        if known is not None and not report.alone:
            self._count(known, report)
        if report.event is not None:
            self._handle(peer, known, report.event)

    def _merge(self, known: _Worker, observed: Observations) -> None:
        self._check_observations(known, observed)
        self._make_room(known)
        self._metrics.merge(observed)

    def _make_room(self, known: _Worker) -> None:
        """Forget the metrics of the former workers of a place, where they and its worker have more than one may."""
        former = self._former_metrics.get(known.place.index, set())
        if len(former) + len(known.metrics) > MOST_NAMES and len(former | known.metrics) > MOST_NAMES:
            self._metrics.forget(former.difference(*(each.metrics for each in self._workers.values())))
            former.clear()

    def _handle(self, peer: Peer, known: _Worker | None, event: WorkerEvent) -> None:
        self.on_event(peer, event)
        begins = isinstance(event, Connected) and known is not None and not known.connected
        if known is not None and begins and self._source:
            known.connected = True
            peer.stepped(self._ledger.step, self._ledger.published)

    def _count(self, known: _Worker, report: WorkerReport) -> None:
        """Count the successes and the ends that a worker reports."""
        self._ledger.succeed(report.succeeded)
        if self._source:
            known.epoch = report.epoch
            self._ledger.epoch = Epoch.of_all([each.epoch for each in self._workers.values()])
        for ending in report.endings:
            self._end(known, ending)

    def _end(self, known: _Worker, ending: Ending) -> None:
        """End trajectories that a worker holds; to drop one twice, or another one, has no effect.

        Raises:
            ProtocolMismatch: it names more that it does not hold than it ever held.
        """
        if self._source and not self._assigned:
            self._ledger.end_unsent(ending.group, mask_of(ending.repetitions), ending.state, ending.reason)
            return
        ended = known.held.get(ending.group, 0) & mask_of(ending.repetitions)
        foreign = len(ending.repetitions) - ended.bit_count()
        known.foreign += foreign
        if foreign and known.foreign > known.given:
            raise ProtocolMismatch(
                f"expected ends of trajectories that this worker was given, {known.given} in all, got {known.foreign} "
                "of others"
            )
        if ended:
            self._take(known, [(ending.group, ended)])
            self._ledger.end(trajectories(ending.group, ended), ending.state, ending.reason)

    def _check_observations(self, known: _Worker, observed: Observations) -> None:
        """Check that a worker has no more metrics than it may, and evaluates its own share.

        Raises:
            ProtocolMismatch: it has more, or evaluates another share.
        """
        known.metrics.update(observed.means, observed.totals, observed.maxima, observed.minima, observed.gauges)
        if len(known.metrics) > MOST_NAMES:
            raise ProtocolMismatch(f"expected at most {MOST_NAMES} metrics of a worker, got {len(known.metrics)}")
        newest, place = max(self._ledger.step, self._ledger.published or 0), known.place
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
            self._settle_if_over(peer.name, known)

    def disconnected(self, peer: Peer) -> None:
        """Return: the supervisor knows when a worker has ended; see `PeerListener`."""

    def ended(self, worker: str, reason: str, *, connected: bool = True, unaccounted_by: str = "") -> None:
        """Record that the process of `worker` ended; trajectories that it still holds are lost, for `reason`.

        A worker that never `connected` sent no records, so no channel reports that all of them were received. If its
        stage has returned, they are `unaccounted_by` that process.
        """
        known = self._workers[worker]
        known.reason, known.drained, known.unaccounted_by = reason, known.drained or not connected, unaccounted_by
        self._settle_if_over(worker, known)

    def close(self, state: EndState, reason: str) -> None:
        """End the accounting, for the run is over: trajectories of a worker end as `state`, unless it has died."""
        self.on_returned = lambda _group, _mask: False
        for worker, known in list(self._workers.items()):
            # 1. It runs. 2. Its stage has returned, and the run ended before all that it had sent was received.
            if not known.reason or (known.unaccounted_by and not known.drained):
                known.reason, known.unaccounted_by = reason, ""
                self._settle(worker, known, state)
            else:
                self._settle(worker, known)

    def _settle_if_over(self, worker: str, known: _Worker) -> None:
        if known.reason and known.drained:
            self._settle(worker, known)

    def _settle(self, worker: str, known: _Worker, state: EndState = "lost") -> None:
        """Count the end of the trajectories of `worker`: its process has ended, and its records were received."""
        # There are three cases for what it holds:
        #
        # 1. Its stage has returned: a stage of a user swallowed it.
        # 2. It is assigned again, and stays in flight.
        # 3. It is not, for its worker was fed, or a worker died with it before: it is lost.
        del self._workers[worker]
        self._former_metrics.setdefault(known.place.index, set()).update(known.metrics)
        count = again = 0
        for group, mask in known.held.items():
            if not known.unaccounted_by and self.on_returned(group, mask):
                again += mask.bit_count()
            else:
                self._ledger.end(trajectories(group, mask), state, known.reason)
                count += mask.bit_count()
        if again:
            log.info("trajectories_assigned_again", worker=worker, count=again, reason=known.reason)
        if count and known.unaccounted_by:
            self._ledger.unaccounted[known.unaccounted_by] += count
        if count:
            report = log.info if known.reason in {RUN_ENDED, RUN_FAILED} else log.warning  # the worker did not fail
            report(f"trajectories_{state}", worker=worker, count=count, reason=known.reason)
        self.on_taken()


def _check_given(known: _Worker, record: Any) -> None:
    """Check that a worker sends only trajectories that it was given.

    Raises:
        ProtocolMismatch: naming the group.
    """
    for group, mask in masks_by_group(record):
        others = mask & ~known.held.get(group, 0)
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
