"""The ledger: every admitted trajectory ends in exactly one state, with a reason, and the sums balance at any moment.

    admitted = in flight + trained + filtered + stale + rejected + failed + lost

One ledger a process. The trainer's process holds the books of the run: a worker's ledger keeps its own counters in a
page of shared memory (`SharedCounters`), which the trainer's ledger adds up, also after the worker was killed. A
trajectory that crosses from a worker is taken over by the trainer's ledger; when it ends there, the worker's ledger is
told (`settle`), which frees its sampling allowance.

A trajectory may be delivered twice. Only one of it is ever in flight: a copy is refused where it enters the books, so
that it goes no further, and counts as admitted and rejected. Sans-I/O: knows no socket and no process. One event loop
uses it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, TypeVar

import msgspec

from ..schemas import GroupId, TrainBatch, TrajectoryGroup, TrajectoryId
from ..schemas.layout import check_sequences
from .committed_prompts import CommittedPrompts
from .errors import LedgerImbalance
from .processes.shared_counters import END_STATES, OTHER_REASONS, EndState, SharedCounters
from .repetition_sets import iter_bits, mask_in, mask_of, masks_in, set_mask
from .waiting import Waiters

__all__ = ["Balance", "CheckpointHearer", "EndState", "Ledger", "Origin"]

Origin: TypeAlias = Callable[[GroupId, int, EndState, int], None]
"""How a trajectory's sampling process is told of its end: (group, repetitions as a bit mask, state, optimizer step)."""

CheckpointHearer: TypeAlias = Callable[[Mapping[GroupId, int]], None]
"""Takes what a checkpoint holds as trained: `Ledger.committed` as it was when it was written."""

L = TypeVar("L")

MAX_REASONS = 64
"""Reasons that are told apart for each end state: error messages may all differ, and a run may fail for days."""

MAX_REASON_LENGTH = 200
"""Characters of a reason that are kept."""

PACE_WINDOW = 8
"""Optimizer steps over which `trained_per_step` averages: long enough to be steady, short enough to follow a change."""


class Balance(msgspec.Struct, frozen=True):
    """The books at one moment."""

    admitted: int
    """Trajectories whose sampling was begun."""
    in_flight: int
    """Those that have not ended."""
    ended: dict[str, int]
    """Those that ended, by state; every state is listed."""
    reasons: dict[str, dict[str, int]]
    """The same by state and reason."""

    @property
    def balanced(self) -> bool:
        """Whether admitted = in flight + ended."""
        return self.admitted == self.in_flight + sum(self.ended.values())


@dataclass(slots=True)
class _Pace:
    """How many of this process' trajectories one optimizer step trains, on average over the last few steps."""

    steps: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=PACE_WINDOW))

    def trained(self, step: int, count: int) -> None:
        if self.steps and self.steps[-1][0] == step:
            count += self.steps.pop()[1]
        self.steps.append((step, count))

    @property
    def per_step(self) -> float | None:
        if not self.steps:
            return None
        span = self.steps[-1][0] - self.steps[0][0] + 1
        return sum(count for _, count in self.steps) / max(1, span)


class Ledger:
    """The books of one process."""

    def __init__(self, account: SharedCounters | None = None, *, admits_on_end: bool = False) -> None:
        self._account = account
        """Where a worker's counters are mirrored for its parent."""
        self._admits_on_end = admits_on_end
        """Whether trajectories may end that nobody admitted: where stages run without a pipeline around them."""
        self._accounts: list[SharedCounters] = []
        """The workers' counters, in the trainer's process."""
        self._open: dict[GroupId, int] = {}
        """Repetitions in flight of each group, as a bit mask."""
        self._begun: dict[GroupId, int] = {}
        """Those of them that were admitted and have not been handed over yet."""
        self._origins: dict[GroupId, dict[Origin, int]] = {}
        """Who sampled the repetitions in flight of each group, as a bit mask each: several may share a prompt."""
        self._committed = CommittedPrompts()
        self._admitted = 0
        self._in_flight = 0
        self._ended: Counter[EndState] = Counter()
        self._reasons: Counter[tuple[EndState, str]] = Counter()
        self._pace = _Pace()
        self._room = Waiters()
        self._hearers: list[CheckpointHearer] = []
        self._on_end: list[Callable[[], None]] = []
        """Called after trajectories have ended."""
        self._succeeded = 0
        """Rollouts that succeeded in this process, or in a worker whose account is closed."""
        self._on_failure: list[Callable[[], None]] = []
        """Called after trajectories were counted as failed."""
        self.step = 0
        """The last optimizer step that was committed, or that this process was told of."""
        self.checkpoint = ""
        """Path of the last checkpoint that was announced, where it was told."""

    def __repr__(self) -> str:
        balance = self.balance()
        ended = ", ".join(f"{count} {state}" for state, count in balance.ended.items() if count)
        return f"<Ledger: {balance.admitted} admitted, {balance.in_flight} in flight, {ended or 'none ended'}>"

    # -- a trajectory's life -----------------------------------------------------------------------------------------

    def admit(self, group: GroupId, repetitions: Iterable[int]) -> int:
        """Count trajectories in whose sampling begins. One that is in flight already is not counted again.

        Returns:
            How many were new.

        Raises:
            LedgerImbalance: one of them was trained before: ids are never reused within a run.
        """
        mask = mask_of(repetitions)
        if again := self._committed.mask(group) & mask:
            raise LedgerImbalance(
                f"{_name(group, again)} was trained before and is admitted again: expected ids that are never reused"
            )
        new, _ = self._enter(group, mask)
        self._admit(new.bit_count())
        set_mask(self._begun, group, self._begun.get(group, 0) | new)
        return new.bit_count()

    def hand_over(self, record: TrajectoryGroup | TrainBatch) -> int:
        """In a source's process: `record` is about to be sent. Those of its trajectories are admitted that were not.

        Returns:
            The repetitions that must not go, as a bit mask. They are copies: of what was handed over before and is in
            flight, or was trained.

        Raises:
            LedgerImbalance: a batch holds a copy. It cannot go without it, so nothing is counted.
            InvalidRecord: a group has no sequences.
        """
        refused = 0
        self.succeed(len(record))
        for group, mask in self._entering(record, self._begun):
            begun = self._begun.get(group, 0)
            new, copies = self._enter(group, mask, begun)
            self._admit((new | copies).bit_count())
            if begun:
                set_mask(self._begun, group, begun & ~mask)
            if copies:
                self._reject_copies(group, copies)
                refused |= copies
        return refused

    def take_back(self, record: TrajectoryGroup | TrainBatch) -> None:
        """In a source's process: `record` was not sent, or leaves a part of the source. It may be handed over again."""
        for group, mask in _masks(record):
            set_mask(self._begun, group, self._begun.get(group, 0) | mask & self._open.get(group, 0))

    def succeed(self, count: int = 1) -> None:
        """In a source's process: count rollouts that succeeded. A success ends a row of failures."""
        self._succeeded += count
        if self._account is not None:
            self._account.succeed(count)

    def refuse(self, copies: int, reason: str) -> None:
        """Count so many copies of what is in these books already, as admitted and rejected. What was first goes on."""
        self._admit(copies)
        self._reject(copies, reason)

    def end(self, what: TrajectoryGroup | Iterable[TrajectoryId], state: EndState, reason: str = "") -> None:
        """Count trajectories out.

        Raises:
            LedgerImbalance: one of them is not in flight: it was never admitted, or ended before. Nothing is counted.
        """
        leaving = _masks(what)
        for group, mask in leaving:
            self._expect_in_flight(group, mask, state)
        self._leave(leaving, state, reason)

    def commit(self, batch: TrainBatch, step: int) -> None:
        """Count the trajectories of `batch` as trained by optimizer step `step`, which is done.

        Raises:
            LedgerImbalance: one of them was trained before, or is not in flight. Nothing is counted.
        """
        trained: dict[GroupId, int] = {}
        masks = masks_in(batch.repetition_ids, [packed.sequences for packed in batch.groups])
        for packed, mask in zip(batch.groups, masks, strict=True):
            group = packed.id
            earlier = trained.get(group, 0)
            if again := (self._committed.mask(group) | earlier) & mask:
                raise LedgerImbalance(f"{_name(group, again)} was trained before and is committed again")
            self._expect_in_flight(group, mask, "trained")
            trained[group] = earlier | mask
        self.step = max(self.step, step)
        self._leave(trained.items(), "trained", "")
        for group, mask in trained.items():
            self._committed.add(group, mask)

    def settle(self, group: GroupId, mask: int, state: EndState, step: int) -> None:
        """In a worker: the trainer's ledger says how trajectories ended that it had taken over.

        One that this ledger does not know is passed over: a restarted worker hears of its predecessor's trajectories.
        """
        self.step = max(self.step, step)
        known = self._open.get(group, 0) & mask
        if known:
            self._remove(group, known)
            self._ended[state] += known.bit_count()  # the reason is in the books where they ended
            if state == "trained":
                self._pace.trained(step, known.bit_count())
            self._room.wake_all()

    # -- between processes -------------------------------------------------------------------------------------------

    def open_account(self, account: SharedCounters) -> None:
        """In the trainer's process: add a worker's counters to the books."""
        self._accounts.append(account)

    def take_over(
        self, record: TrajectoryGroup | TrainBatch, origin: Origin | None = None, account: SharedCounters | None = None
    ) -> int:
        """Take a record into these books that came from another process.

        Args:
            record: what came.
            origin: is told when the record's trajectories end here.
            account: the worker's counters, where it keeps any; without one the record is admitted here.

        Returns:
            The repetitions that must not go on, as a bit mask. They are copies: of what is in flight here, or was
            trained. Their origin is told at once.

        Raises:
            LedgerImbalance: a batch holds a copy. It cannot go on without it, so nothing is counted.
        """
        refused = 0
        for group, mask in self._entering(record, {}):
            new, copies = self._enter(group, mask)
            if account is None:
                self._admitted += mask.bit_count()
            else:
                account.taken_over += mask.bit_count()
            if origin is not None and new:
                origins = self._origins.setdefault(group, {})
                origins[origin] = origins.get(origin, 0) | new
            if copies:
                self._reject_copies(group, copies)
                refused |= copies
                if origin is not None:
                    origin(group, copies, "rejected", self.step)
        return refused

    def close_account(self, account: SharedCounters, reason: str) -> int:
        """A worker is gone: what it still held is lost, with `reason`. Returns how many trajectories that were."""
        if account not in self._accounts:
            return 0
        self._accounts.remove(account)
        lost = account.in_flight
        self._admitted += account.admitted
        self._succeeded += account.succeeded
        for state, reason_told, count in account.ends():
            self._count(state, reason_told, count)
        self._count("lost", reason, lost)
        account.close()
        return lost

    def lose(self, reason: str) -> int:
        """The run is over: whatever is in flight is lost, with `reason`. Returns how many trajectories that were."""
        lost = sum(self.close_account(account, reason) for account in list(self._accounts))
        left = list(self._open.items())
        self._leave(left, "lost", reason)
        return lost + sum(mask.bit_count() for _, mask in left)

    # -- asking ------------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Trajectories in flight in these books: admitted here or taken over, and not ended anywhere."""
        return self._in_flight

    def failures(self) -> tuple[int, int]:
        """Return how many trajectories failed and how many rollouts succeeded, those in workers included.

        Failures are read first: successes that have not grown since then prove that these failures are in a row.
        """
        failed = self._ended["failed"] + sum(account.ended("failed") for account in self._accounts)
        return failed, self._succeeded + sum(account.succeeded for account in self._accounts)

    @property
    def trained_per_step(self) -> float | None:
        """Trajectories of these books that one optimizer step trains, averaged over the last steps; None before any."""
        return self._pace.per_step

    @property
    def committed(self) -> CommittedPrompts:
        """Repetitions of each group that were trained, as a bit mask: what a checkpoint keeps. A copy, as of now."""
        return CommittedPrompts(self._committed)

    def restore(self, committed: Mapping[GroupId, int], step: int) -> None:
        """Continue from a checkpoint: these were trained by a run that this one resumes."""
        self._committed = CommittedPrompts(committed)
        self.step = step

    def known(self, group: GroupId) -> int:
        """The repetitions of `group` that are in flight in these books or were trained, as a bit mask."""
        return self._open.get(group, 0) | self._committed.mask(group)

    def is_open(self, trajectory: TrajectoryId) -> bool:
        """Whether the trajectory is in flight in these books."""
        return bool(self._open.get(trajectory.group, 0) >> trajectory.repetition_id & 1)

    def is_committed(self, trajectory: TrajectoryId) -> bool:
        """Whether the trajectory was trained."""
        return bool(self._committed.get(trajectory.group, 0) >> trajectory.repetition_id & 1)

    async def room(self, limit: float) -> None:
        """Wait until fewer than `limit` trajectories of these books are in flight."""
        while self._in_flight >= limit:
            await self._room.wait()

    async def ended(self, group: GroupId) -> None:
        """Wait until no trajectory of `group` is in flight in these books."""
        while group in self._open:
            await self._room.wait()

    def balance(self) -> Balance:
        """The books now, with those of all workers that keep an account."""
        ended: dict[str, int] = {state: self._ended[state] for state in END_STATES}
        reasons: dict[str, dict[str, int]] = {state: {} for state in END_STATES}
        for (state, reason), count in self._reasons.items():
            reasons[state][reason] = count
        admitted, in_flight = self._admitted, self._in_flight
        for account in self._accounts:
            ends = list(account.ends())  # before the admissions: a worker may be counting meanwhile
            for state, reason, count in ends:
                ended[state] += count
                reasons[state][reason] = reasons[state].get(reason, 0) + count
            entered = account.admitted
            admitted += entered
            in_flight += entered - sum(count for _, _, count in ends) - account.taken_over
        return Balance(admitted, in_flight, ended, reasons)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def announce_checkpoint(self, committed: Mapping[GroupId, int], path: str | Path = "") -> None:
        """Note that a checkpoint is on the disk, at `path`, that holds `committed` as trained."""
        self.checkpoint = str(path)
        for hear in self._hearers:
            hear(committed)

    def hearing_of_checkpoints(self, hear: CheckpointHearer) -> AbstractContextManager[None]:
        """Within the body, call `hear` with what every checkpoint of the run holds."""
        return _listed(self._hearers, hear)

    # -- ends and failures -------------------------------------------------------------------------------------------

    def calling_on_end(self, call: Callable[[], None]) -> AbstractContextManager[None]:
        """Within the body, call `call` after trajectories have ended in this ledger."""
        return _listed(self._on_end, call)

    def calling_on_failure(self, call: Callable[[], None]) -> AbstractContextManager[None]:
        """Within the body, call `call` after trajectories were counted as failed, here or in a worker."""
        return _listed(self._on_failure, call)

    def failures_changed(self) -> None:
        """A worker reported: its account may hold new failures."""
        for call in self._on_failure:
            call()

    # -- counting ----------------------------------------------------------------------------------------------------

    def _entering(
        self, record: TrajectoryGroup | TrainBatch, begun: Mapping[GroupId, int]
    ) -> Collection[tuple[GroupId, int]]:
        """What is about to enter, by group. Those that are `begun` are no copies."""
        entering = _masks(record)
        if isinstance(record, TrainBatch):
            for group, mask in entering:
                if copies := mask & self.known(group) & ~begun.get(group, 0):
                    raise LedgerImbalance(
                        f"{_name(group, copies)} is in flight or was trained, and comes again in a batch: expected a "
                        f"batch of trajectories that come once, for it cannot go on without some"
                    )
        return entering

    def _enter(self, group: GroupId, mask: int, begun: int = 0) -> tuple[int, int]:
        """These are in flight from now on. Returns which of them were not, and which must not go on: copies."""
        present = self._open.get(group, 0)
        copies = mask & (present & ~begun | self._committed.mask(group))
        new = mask & ~(present | copies)
        if new:
            self._add(group, new)
        return new, copies

    def _add(self, group: GroupId, new: int) -> None:
        self._open[group] = self._open.get(group, 0) | new
        self._in_flight += new.bit_count()

    def _reject_copies(self, group: GroupId, copies: int) -> None:
        trained = copies & self._committed.mask(group)
        self._reject(trained.bit_count(), "trained already")
        self._reject((copies & ~trained).bit_count(), "in flight already")

    def _reject(self, copies: int, reason: str) -> None:
        self._count("rejected", reason, copies)
        if self._account is not None:
            self._account.end("rejected", copies)

    def _admit(self, count: int) -> None:
        self._admitted += count
        if self._account is not None:
            self._account.admit(count)

    def _remove(self, group: GroupId, mask: int) -> None:
        set_mask(self._open, group, self._open[group] & ~mask)
        if group in self._begun:
            set_mask(self._begun, group, self._begun[group] & ~mask)
        self._in_flight -= mask.bit_count()

    def _expect_in_flight(self, group: GroupId, mask: int, state: EndState) -> None:
        absent = mask & ~self._open.get(group, 0)
        if absent and not self._admits_on_end:
            raise LedgerImbalance(
                f"{_name(group, absent)} ended as {state} but is not in flight: "
                f"expected every trajectory to be admitted once and to end once"
            )

    def _leave(self, leaving: Collection[tuple[GroupId, int]], state: EndState, reason: str) -> None:
        """These end, which are in flight: no group twice. Who sampled them is told when the books are right again."""
        if self._admits_on_end:
            self._admit_absent(leaving)
        ended = 0
        for group, mask in leaving:
            self._remove(group, mask)
            ended += mask.bit_count()
        self._count(state, reason, ended)
        if self._account is not None:
            self._account.end(state, ended)
        own = []
        for group, mask in leaving:
            origins = self._origins.get(group)
            if origins is not None:
                self._tell(origins, group, mask, state)
            else:
                own.append(mask.bit_count())
        if own and state == "trained":
            self._pace.trained(self.step, sum(own))
        if self._room:
            self._room.wake_all()
        for call in self._on_end:
            call()
        if state == "failed":
            self.failures_changed()

    def _admit_absent(self, leaving: Collection[tuple[GroupId, int]]) -> None:
        for group, mask in leaving:
            absent = mask & ~self._open.get(group, 0)
            self._add(group, absent)
            self._admitted += absent.bit_count()

    def _tell(self, origins: dict[Origin, int], group: GroupId, mask: int, state: EndState) -> None:
        """Tell every process that sampled some of these how they ended."""
        if group not in self._open:
            del self._origins[group]
        for origin, sampled in origins.items():
            if ended := sampled & mask:
                origins[origin] = sampled & ~mask
                origin(group, ended, state, self.step)

    def _count(self, state: EndState, reason: str, count: int) -> None:
        if count:
            self._ended[state] += count
            self._reasons[state, self._kept_reason(state, reason)] += count

    def _kept_reason(self, state: EndState, reason: str) -> str:
        """Return `reason` as it is kept: cut where it is long, and `OTHER_REASONS` where there are too many."""
        if len(reason) > MAX_REASON_LENGTH:
            reason = reason[: MAX_REASON_LENGTH - 1] + "…"
        if (state, reason) in self._reasons or sum(kept == state for kept, _ in self._reasons) < MAX_REASONS:
            return reason
        return OTHER_REASONS


@contextmanager
def _listed(listeners: list[L], listener: L) -> Iterator[None]:
    """Within the body, `listener` is among `listeners`."""
    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)


def _masks(what: TrajectoryGroup | TrainBatch | Iterable[TrajectoryId]) -> Collection[tuple[GroupId, int]]:
    """Repetitions by group, as bit masks."""
    if isinstance(what, TrajectoryGroup):
        check_sequences(len(what))
        return [(what.id, mask_in(what.repetition_ids))]
    masks: dict[GroupId, int] = {}
    for trajectory in what.ids if isinstance(what, TrainBatch) else what:
        group = trajectory.group
        masks[group] = masks.get(group, 0) | 1 << trajectory.repetition_id
    return masks.items()


def _name(group: GroupId, mask: int) -> str:
    return f"{group.env}/{group.instance_id} repetitions {list(iter_bits(mask))}"
