"""TrajectoryQueue: the state of the gateway. Trainers, environments, groups that wait, batches under a lease.

It decides and counts; it knows no HTTP, clock or event loop, and not the content of a group. Every group
that is accepted leaves exactly once, unless a lease on it ends without an acknowledgement: then it is leased again.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from ....._pipeline.accounting.telemetry import get_logger
from ..contract import EnvRegistration, TrainerRegistration
from .batches import MAX_BATCH_SIZE, LeaseTable, PreparedBatch, StallDetector, form_batch, unpackable
from .environments import Allocation, EnvBuffer, Environment, Environments, QueueDepth
from .records import (
    Batch,
    EnvAdmitted,
    EnvStatus,
    IdempotencyCache,
    Info,
    InvalidRegistration,
    NoTrainer,
    QueueFull,
    Receipt,
    Status,
    Submission,
    UnpackableGroupSize,
    WandbInfo,
)
from .scheduling import ANONYMOUS, AdmissionControl, FairScheduler, PendingGroups, QueuedGroup

G = TypeVar("G")

DEFAULT_CAPACITY = 4_096
DEFAULT_CAPACITY_BYTES = 2**30

DEFAULT_HEARTBEAT_TIMEOUT_S = 60.0
"""An environment asks for its status every 0.1 to 1 s, unless its event loop is held up."""

MAX_DOWNSTREAM = 4_096
"""Groups in the pipeline's channel that are remembered for `env_status`; bounded, for no environment may ever ask."""

log = get_logger("penstock.atropos.queue")


class TrajectoryQueue(Generic[G]):
    """The gateway's queue.

    `now` is a clock's reading in seconds that never goes back: the caller's `time.monotonic()`.

    Args:
        capacity: groups that may be held: buffered, waiting, or under a lease; None for any number.
        capacity_bytes: bytes of those; None for any number.
        heartbeat_timeout_s: time without a request until an environment loses share and minimum, up to its next.
        batches: True if trainers ask for batches; False if a pipeline takes groups one by one.
    """

    def __init__(
        self,
        *,
        capacity: int | None = DEFAULT_CAPACITY,
        capacity_bytes: int | None = DEFAULT_CAPACITY_BYTES,
        heartbeat_timeout_s: float = DEFAULT_HEARTBEAT_TIMEOUT_S,
        batches: bool = True,
    ) -> None:
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self.batches = batches
        """False if a pipeline takes groups one by one."""
        self.reset()

    def reset(self) -> None:
        """Forget everything: the trainer, all environments and all groups."""
        self.restart = secrets.token_hex(8)
        """Random id of this queue, new after each reset."""
        self.step = 0
        """The trainer's step: `batch` counts it; a pipeline that takes groups sets it."""
        self.latest: Submission[G] | None = None
        """The group that was queued last."""
        self.trainer: TrainerRegistration | None = None
        """The last registration."""
        self._started = False
        """True once a trainer asked for a batch, or a pipeline for a group."""
        self._envs: Environments[G] = Environments(self._heartbeat_timeout_s)
        self._groups = AdmissionControl("groups", self._capacity)
        self._bytes = AdmissionControl("bytes", self._capacity_bytes)
        self._pending: PendingGroups[G] = PendingGroups()
        self._scheduler = FairScheduler()
        self._leases: LeaseTable[G] = LeaseTable()
        self._formed = 0
        self._undelivered = IdempotencyCache()
        self._stalls = StallDetector()
        self._downstream: deque[tuple[int, int]] = deque(maxlen=MAX_DOWNSTREAM)
        """Lane and size of groups that were taken, the oldest first, that may still be in the channel."""
        self._allocate()

    # -- registrations -------------------------------------------------------------------------------------------------

    def register_trainer(self, registration: TrainerRegistration) -> int:
        """Register a trainer, in place of any before; return its number, of 128 bits.

        Raises:
            InvalidRegistration: `batch_size` is outside the supported range.
        """
        if not 1 <= registration.batch_size <= MAX_BATCH_SIZE:
            raise InvalidRegistration(
                f"expected a batch_size from 1 to {MAX_BATCH_SIZE}, got {registration.batch_size}"
            )
        self.trainer = registration
        self.step = registration.starting_step
        self._allocate()
        return secrets.randbits(128)

    def register_env(self, now: float, registration: EnvRegistration) -> EnvAdmitted | None:
        """Register an environment. Return None before the first request for a batch: it must ask again.

        Raises:
            UnpackableGroupSize: groups of its size can never be in a batch.
            InvalidRegistration: a number is outside the supported range.
        """
        self.expire(now)
        trainer = self.trainer
        if trainer is None or not self._started:
            return None
        if not 1 <= registration.group_size <= trainer.batch_size:
            raise UnpackableGroupSize(
                f"expected a group_size from 1 to the trainer's batch_size of {trainer.batch_size}, got "
                f"{registration.group_size}: such groups can never be in a batch"
            )
        env = self._envs.admit(now, registration)
        self._allocate()
        return EnvAdmitted(
            env_id=env.env_id,
            wandb_name=env.name,
            checkpoint_dir=trainer.checkpoint_dir,
            starting_step=self.step,
            checkpoint_interval=trainer.save_checkpoint_interval,
            num_steps=trainer.num_steps,
        )

    def disconnect_env(self, env_id: int) -> None:
        """Remove an environment's share and minimum; the groups that it submitted stay.

        Raises:
            UnknownEnvironment: there is no such environment.
        """
        env = self._envs.get(env_id)
        self._envs.disconnect(env)
        self._release(env)
        self._allocate()

    def expire(self, now: float) -> None:
        """Remove the shares and minima of environments whose heartbeat timed out, and log stalls."""
        if expired := self._envs.expire(now):
            for env in expired:
                log.warning("environment_timed_out", name=env.name, idle_s=now - env.last_request)
                self._release(env)
            self._allocate()
        self._stalls.check(now, self.stalls)

    def _release(self, env: Environment[G]) -> None:
        """Queue the buffered groups of an environment that left: no other group will complete them."""
        self._enqueue(env.buffer.pop_all())

    def _record_request(self, now: float, env: Environment[G]) -> None:
        if self._envs.record_request(now, env):
            self._allocate()

    def _allocate(self) -> None:
        """Recompute the allocation from the active environments."""
        self._allocation = Allocation.of(self._envs.active(), self._batch_size)
        self._scheduler.set_shares(self._allocation.shares)
        self._changed()

    def _changed(self) -> None:
        """Note that the waiting groups or the active environments have changed."""
        self._depth: QueueDepth | None = None
        self._no_batch = False
        """True if no batch can be formed, and the queue has not changed since that was found."""

    # -- queries ------------------------------------------------------------------------------------------------------

    def wandb_info(self) -> WandbInfo:
        """Return where environments log."""
        if self.trainer is None:
            return WandbInfo(None, None)
        return WandbInfo(self.trainer.wandb_group, self.trainer.wandb_project)

    def info(self) -> Info:
        """Return the trainer's limits."""
        return Info(-1, -1) if self.trainer is None else Info(self.trainer.batch_size, self.trainer.max_token_len)

    def name(self, env_id: int | None) -> str | None:
        """Return the numbered name of an environment, or None if it did not register."""
        env = self._envs.find(env_id)
        return None if env is None else env.name

    @property
    def waiting(self) -> int:
        """Return the number of groups that wait."""
        return len(self._pending)

    def status(self, *, downstream: int = 0) -> Status:
        """Return step and queue size of the run; `downstream` as in `env_status`."""
        return Status(self.step, len(self._pending) + downstream)

    def env_status(self, now: float, env_id: int, *, downstream: int = 0) -> EnvStatus:
        """Return the numbers that an environment controls its flow by.

        `downstream` is the number of groups from `take` that still wait in the pipeline's channel, first in, first out:
        as many of the last taken are counted as if they waited here.

        Raises:
            NoTrainer: no trainer registered.
            UnknownEnvironment: there is no such environment.
        """
        self.expire(now)
        self._check_trainer()
        env = self._envs.get(env_id)
        self._record_request(now, env)
        depth = self._current_depth(downstream)
        own, size = depth.own.get(env_id, 0), env.buffer.group_size
        return EnvStatus(
            current_step=self.step,
            queue_size=(own + sum(depth.beyond.values()) - depth.beyond.get(env_id, 0)) // size,
            unallocated_fraction=self._allocation.unallocated,
            self_queue_size=own // size,
            max_group_size=depth.largest,
            env_weight=self._allocation.weight(env),
        )

    def _current_depth(self, downstream: int) -> QueueDepth:
        while len(self._downstream) > downstream:
            self._downstream.popleft()
            self._depth = None
        if self._depth is None:
            sizes = {lane: own.sizes.copy() for lane, own in self._pending.lanes.items()}
            for lane, size in self._downstream:
                sizes.setdefault(lane, Counter())[size] += 1
            never = unpackable(self._sizes(), self._batch_size) if self.batches else frozenset[int]()
            self._depth = QueueDepth.of(sizes, never, self._allocation.minima)
        return self._depth

    def _sizes(self) -> frozenset[int]:
        """Return the sizes of groups that wait, and of those that active environments registered with."""
        return self._allocation.group_sizes | self._pending.sizes()

    @property
    def _batch_size(self) -> int:
        """Return 0 where no trainer registered."""
        return 0 if self.trainer is None else self.trainer.batch_size

    def _check_trainer(self) -> None:
        if self.trainer is None:
            raise NoTrainer("expected a trainer that registered, got none: it must call /register first")

    # -- submissions --------------------------------------------------------------------------------------------------

    def submit(self, now: float, submissions: Sequence[Submission[G]], *, digest: Hashable = None) -> Receipt:
        """Accept all submissions together, or raise.

        `digest` is that of their body, see `remember_undelivered`.

        Raises:
            QueueFull: the room is taken now; the original client tries again.
            SubmissionTooLarge: together they exceed the bound itself.
            UnpackableGroupSize: the size of one of them never fits a batch.
        """
        self.expire(now)
        senders = {env.env_id: env for each in submissions if (env := self._envs.find(each.env_id)) is not None}
        for env in senders.values():
            self._record_request(now, env)
        if digest is not None and (receipt := self._undelivered.pop(now, digest)) is not None:
            return replace(receipt, duplicate=True)
        for submission in submissions:
            self.check_size(submission.sequences)
            if (buffer := self._envs.buffer(submission)) is not None:
                buffer.check(submission.sequences)
        self._check_room(submissions, list(senders.values()))
        return self._accept(submissions)

    def _accept(self, submissions: Sequence[Submission[G]]) -> Receipt:
        buffered: list[EnvBuffer[G]] = []
        for submission in submissions:
            self._hold(self._lane(submission), submission, 1)
            if (sender := self._envs.find(submission.env_id)) is not None:
                sender.submitted += submission.sequences
            if (buffer := self._envs.buffer(submission)) is None:
                self._enqueue([submission])
            else:
                buffer.add(submission)
                buffered.append(buffer)
        for buffer in {id(buffer): buffer for buffer in buffered}.values():
            while whole := buffer.pop_whole():
                self._enqueue(whole)
        return Receipt(len(buffered), buffered[-1].sequences if buffered else None)

    def _enqueue(self, submissions: list[Submission[G]]) -> None:
        for submission in submissions:
            self._pending.append(self._lane(submission), submission)
            self._count(self._lane(submission), queued=submission.sequences)
            self.latest = submission
        self._changed()

    def _count(self, lane: int, *, queued: int, taken: int = 0) -> None:
        if (env := self._envs.find(lane)) is not None:
            env.queued += queued
            env.taken += taken

    def _hold(self, lane: int, submission: Submission[G], groups: int) -> None:
        """Count a group as held (1), or no longer (-1), by its lane when it was accepted."""
        self._groups.hold(lane, groups)
        self._bytes.hold(lane, groups * submission.nbytes)

    def check_size(self, sequences: int) -> None:
        """Check the size of a group.

        Raises:
            UnpackableGroupSize: no batch of the trainer can hold it.
        """
        most = self._batch_size or math.inf
        if not 1 <= sequences <= most:
            raise UnpackableGroupSize(
                f"expected groups of 1 to {most} sequences, got {sequences}: such a group can never be in a batch"
            )

    def _check_room(self, submissions: Sequence[Submission[G]], senders: list[Environment[G]]) -> None:
        """Check the room; once a batch's worth waits, it is shared with the other active environments."""
        enough = self._pending.sequences >= self._batch_size
        nbytes = sum(submission.nbytes for submission in submissions)
        try:
            for lane in sorted({self._lane(submission) for submission in submissions}):
                shared = enough and self._envs.others_active(lane)
                self._groups.check(lane, len(submissions), shared=shared)
                self._bytes.check(lane, nbytes, shared=shared)
        except QueueFull:
            self._no_batch = False
            for env in senders:
                env.found_queue_full = True
            raise
        for env in senders:
            env.found_queue_full = False

    def _lane(self, submission: Submission[G]) -> int:
        env = self._envs.find(submission.env_id)
        return ANONYMOUS if env is None else env.env_id

    def remember_undelivered(self, now: float, digest: Hashable, receipt: Receipt) -> None:
        """Return `receipt` for the next submission with this digest: its sender got no answer."""
        self._undelivered.remember(now, digest, receipt)

    # -- batches ------------------------------------------------------------------------------------------------------

    def batch(self, now: float, *, lease_s: float) -> Batch[G] | None:
        """Return the next batch, or None while there is none.

        It must be acknowledged within `lease_s`, or it is leased again, before any other.

        Raises:
            NoTrainer: no trainer registered.
        """
        self.expire(now)
        self._check_trainer()
        self._started = True
        prepared = self._due(now) or self._form()
        return None if prepared is None else self._leases.lend(prepared, now + lease_s)

    def _due(self, now: float) -> PreparedBatch[G] | None:
        """Return a batch to lease again; those that were formed for another batch_size are taken apart."""
        while (prepared := self._leases.pop_due(now)) is not None and prepared.sequences != self._batch_size:
            self._pending.put_back(prepared.groups)
            for queued in prepared.groups:
                self._count(queued.lane, queued=queued.sequences, taken=-queued.sequences)
            self._changed()
        return prepared

    def _form(self) -> PreparedBatch[G] | None:
        if self._no_batch:
            return None
        groups = form_batch(
            self._pending,
            lambda: self._scheduler.in_turn(self._pending.lanes),
            self._batch_size,
            self._awaited_minima(),
        )
        if groups is None:
            self._no_batch = True
            return None
        for queued in groups:
            self._leave(queued)
        self.step += 1
        self._formed += 1
        return PreparedBatch(self._formed, f"{self.restart}.{self._formed}", groups)

    def _awaited_minima(self) -> dict[int, int]:
        """Return the minima that batches wait for.

        An environment that found the queue full is not waited for: only a batch makes room, so the wait would not end.
        """
        return {
            lane: wanted
            for lane, wanted in self._allocation.minima.items()
            if lane in self._pending.lanes or not self._envs.get(lane).found_queue_full
        }

    def _leave(self, queued: QueuedGroup[G]) -> None:
        self._pending.remove(queued)
        self._scheduler.charge(queued.lane, queued.sequences)
        self._count(queued.lane, queued=-queued.sequences, taken=queued.sequences)
        self._changed()

    def acknowledge(self, now: float, lease: int) -> Batch[G]:
        """Forget the batch of this lease, now a trainer's, and return it: in time, or before it was leased again.

        Raises:
            UnknownLease: it was acknowledged before, or was not in time and was leased again.
        """
        self.expire(now)
        prepared = self._leases.acknowledge(lease)
        for queued in prepared.groups:
            self._hold(queued.lane, queued.submission, -1)
        return prepared.batch(lease)

    @property
    def outstanding(self) -> int:
        """Return the number of batches that were formed and are not acknowledged."""
        return len(self._leases)

    def return_batch(self, lease: int) -> None:
        """Make the batch of this lease the next that `batch` returns: no trainer received it."""
        self._leases.return_batch(lease)

    def take(self, now: float) -> Submission[G] | None:
        """Return the next group for a pipeline, or None while there is none.

        Environments have their shares by weight, and at least their minimum, in sequences: batches, group sizes and
        minima are counted in sequences, and an environment with longer sequences gets no fewer of them.
        As with `batch`, environments may register from the first call on.
        """
        self.expire(now)
        self._started = True
        queued = next(self._scheduler.in_turn(self._pending.lanes), None)
        if queued is None:
            return None
        self._leave(queued)
        self._downstream.append((queued.lane, queued.sequences))
        self._hold(queued.lane, queued.submission, -1)
        return queued.submission

    # -- observation ---------------------------------------------------------------------------------------------------

    def stalls(self) -> list[str]:
        """Return one sentence for each reason that groups will wait until the configuration changes."""
        if not self.batches:
            return []
        if self.trainer is None:
            return ["groups wait, and no trainer registered"] if self._pending.sequences else []
        reasons: list[str] = []
        size, sizes = self._batch_size, self._sizes()
        if never := unpackable(sizes, size):
            reasons.append(f"groups of {sorted(never)} are in no batch of {size}: no other groups make up the rest")
        if self._capacity is not None and self._capacity * max(sizes, default=size) < size:
            reasons.append(f"a capacity of {self._capacity} groups of at most {max(sizes)} holds no batch of {size}")
        if self._pending.sequences >= size:
            reasons += [
                f"batches wait for {self.name(lane)}, which must have {wanted} of {size} and has no group that waits"
                for lane, wanted in sorted(self._awaited_minima().items())
                if wanted > 0 and lane not in self._pending.lanes
            ]
        return reasons

    def environments(self, now: float) -> list[Environment[G]]:
        """Return every environment that registered, with its counters, by id."""
        self.expire(now)
        return [*self._envs]
