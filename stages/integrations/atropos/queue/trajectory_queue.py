"""TrajectoryQueue: what the gateway knows. Trainers, environments, groups that wait, batches that are out.

It decides and counts; it knows nothing about HTTP, clocks or event loops, nor about what is in a group. Whatever is
accepted is handed out exactly once, unless a lease on it expires: then it is handed out again.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from .....pipeline.telemetry import get_logger
from ..contract import EnvRegistration, TrainerRegistration
from .demands import Demands
from .environments import DEFAULT_HEARTBEAT_TIMEOUT_S, Environment, Environments
from .exact_sums import MOST_SEQUENCES
from .group_queue import NOBODY
from .outgoing import Formed, Outgoing
from .records import (
    Batch,
    EnvAdmitted,
    EnvStatistics,
    EnvStatus,
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
from .room import DEFAULT_CAPACITY, DEFAULT_CAPACITY_BYTES, Room
from .stuck import Stuck, Watch
from .undelivered import Undelivered
from .waiting import Waiting

__all__ = ["TrajectoryQueue"]

G = TypeVar("G")

log = get_logger("penstock.atropos.queue")


class TrajectoryQueue(Generic[G]):
    """The gateway's queue.

    `now` is a clock's reading in seconds that never goes back: the caller's `time.monotonic()`.

    Args:
        capacity: groups that may wait, be formed into batches, or be out on a lease; None for any number.
        capacity_bytes: bytes of those; None for any number.
        heartbeat_timeout_s: an environment that is not heard of for so long does not count until it is.
        batches: whether trainers ask for batches; not where a pipeline takes groups one by one.
    """

    def __init__(
        self,
        *,
        capacity: int | None = DEFAULT_CAPACITY,
        capacity_bytes: int | None = DEFAULT_CAPACITY_BYTES,
        heartbeat_timeout_s: float = DEFAULT_HEARTBEAT_TIMEOUT_S,
        batches: bool = True,
    ) -> None:
        self._stuck = Stuck(capacity, batches)
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self.reset()

    def reset(self) -> None:
        """Be as new: no trainer, no environments, no groups."""
        self.incarnation = secrets.token_hex(8)
        """Of these queue, since they were made or reset: no others, of this process or another, have the same."""
        self.step = 0
        """The trainer's step: `batch` counts it; whoever takes groups for a pipeline sets it."""
        self.latest: Submission[G] | None = None
        """The group that was queued last."""
        self.trainer: TrainerRegistration | None = None
        """Who counts as the trainer."""
        self._started = False
        """A trainer asked for a batch, or a pipeline for a group."""
        self._envs: Environments[G] = Environments(self._heartbeat_timeout_s)
        self._room = Room(self._capacity, self._capacity_bytes)
        self._waiting: Waiting[G] = Waiting()
        self._outgoing: Outgoing[G] = Outgoing(self.incarnation)
        self._undelivered = Undelivered()
        self._watch = Watch()
        self._recount()

    # -- who there is --------------------------------------------------------------------------------------------------

    def register_trainer(self, registration: TrainerRegistration) -> int:
        """A trainer is there; returns the number it is known by. It is the one that runs, whoever registered before.

        Raises:
            InvalidRegistration: its batches hold nothing, or more than any does.
        """
        if not 1 <= registration.batch_size <= MOST_SEQUENCES:
            raise InvalidRegistration(
                f"expected a batch_size from 1 to {MOST_SEQUENCES}, got {registration.batch_size}"
            )
        self.trainer = registration
        self.step = registration.starting_step
        self._recount()
        return secrets.randbits(128)

    def register_env(self, now: float, registration: EnvRegistration) -> EnvAdmitted | None:
        """An environment is there; None while no trainer asked for a batch yet: it is to ask again.

        Raises:
            UnpackableGroupSize: groups of its size can never be in a batch.
            InvalidRegistration: it says numbers of itself that cannot be reckoned with.
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
        self._recount()
        return EnvAdmitted(
            env_id=env.env_id,
            wandb_name=env.name,
            checkpoint_dir=trainer.checkpoint_dir,
            starting_step=self.step,
            checkpoint_interval=trainer.save_checkpoint_interval,
            num_steps=trainer.num_steps,
        )

    def disconnect_env(self, env_id: int) -> None:
        """An environment leaves; what it submitted stays.

        Raises:
            UnknownEnvironment: there is no such environment.
        """
        env = self._envs.get(env_id)
        self._envs.disconnect(env)
        self._release(env)
        self._recount()

    def wandb_info(self) -> WandbInfo:
        """Where environments log."""
        if self.trainer is None:
            return WandbInfo(None, None)
        return WandbInfo(self.trainer.wandb_group, self.trainer.wandb_project)

    def info(self) -> Info:
        """What environments ask before they begin."""
        return Info(-1, -1) if self.trainer is None else Info(self.trainer.batch_size, self.trainer.max_token_len)

    def expire(self, now: float) -> None:
        """What was due until `now` happens: leases end, environments fall silent. All that is told `now` does this."""
        self._outgoing.expire(now)
        if fallen := self._envs.expire(now):
            for env in fallen:
                log.warning("environment_silent", name=env.name, silent_s=now - env.heard)
                self._release(env)
            self._recount()
        self._watch.look(now, self.stalls)

    def _release(self, env: Environment[G]) -> None:
        """What is held back of an environment that is gone waits for nothing: it is queued as it is."""
        self._enqueue(env.buffer.groups)
        env.buffer.groups = []

    def _hear(self, now: float, env: Environment[G]) -> None:
        if self._envs.hear(now, env):
            self._recount()

    def _recount(self) -> None:
        """What follows from who counts, and from what they asked for."""
        self._demands = Demands.of(self._envs.counted(), self._batch_size)
        self._waiting.heed(self._demands.parts, self._demands.least)

    def name(self, env_id: int | None) -> str | None:
        """What an environment is called, if there is one of this id."""
        env = self._envs.find(env_id)
        return None if env is None else env.name

    # -- what they ask -------------------------------------------------------------------------------------------------

    def status(self, *, downstream: int = 0) -> Status:
        """Where the run is; `downstream` as in `env_status`."""
        return Status(self.step, len(self._waiting.queue) + downstream)

    def env_status(self, now: float, env_id: int, *, downstream: int = 0) -> EnvStatus:
        """What an environment controls its flow with.

        `downstream` is how many groups that `take` returned still wait in the pipeline's channel, first in, first out:
        the last so many that were taken are counted as if they waited here.

        Raises:
            NoTrainer: no trainer registered.
            UnknownEnvironment: there is no such environment.
        """
        self.expire(now)
        self._check_trainer()
        env = self._envs.get(env_id)
        self._hear(now, env)
        depth = self._waiting.depth
        depth.passed(downstream)
        depth.leave_out(self._stuck.unpackable(self._waiting.queue, self._batch_size, self._demands))
        own, size = depth.own(env_id), env.buffer.group_size
        return EnvStatus(
            current_step=self.step,
            queue_size=(own + depth.others(env_id)) // size,
            unallocated_fraction=self._demands.unallocated,
            self_queue_size=own // size,
            max_group_size=depth.largest,
            env_weight=self._demands.weight(env),
        )

    @property
    def _batch_size(self) -> int:
        """0 where no trainer registered."""
        return 0 if self.trainer is None else self.trainer.batch_size

    def _check_trainer(self) -> None:
        if self.trainer is None:
            raise NoTrainer("expected a trainer that registered, got none: it is to call /register first")

    # -- what comes in -------------------------------------------------------------------------------------------------

    def submit(self, now: float, submissions: Sequence[Submission[G]], *, digest: bytes | None = None) -> Receipt:
        """Accept all submissions, or none.

        `digest` is of the bytes that brought them, as `undelivered` is told it.

        Raises:
            QueueFull: there is no room now; the original client tries again.
            SubmissionTooLarge: there will never be room for all of them at once.
            UnpackableGroupSize: one of them can never be part of a batch.
        """
        self.expire(now)
        senders = {env.env_id: env for each in submissions if (env := self._envs.find(each.env_id)) is not None}
        for env in senders.values():
            self._hear(now, env)
        if digest is not None and (receipt := self._undelivered.receipt(now, digest)) is not None:
            return replace(receipt, duplicate=True)
        for submission in submissions:
            self.check_size(submission.sequences)
        buffers, queued, receipt = self._envs.planned(submissions)
        self._check_room(now, submissions, list(senders.values()))
        for env_id, buffer in buffers.items():
            senders[env_id].buffer = buffer
        for submission in submissions:
            lane = self._lane(submission)
            self._room.hold(lane, submission)
            if lane in senders:
                senders[lane].submitted += submission.sequences
        self._enqueue(queued)
        return receipt

    def _enqueue(self, submissions: list[Submission[G]]) -> None:
        for submission in submissions:
            self._waiting.append(self._lane(submission), submission)
            self.latest = submission

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

    def _check_room(self, now: float, submissions: Sequence[Submission[G]], senders: list[Environment[G]]) -> None:
        enough = self._waiting.queue.sequences >= self._batch_size
        try:
            for lane in sorted({self._lane(submission) for submission in submissions}):
                self._room.check(now, lane, submissions, crowd=enough and self._envs.others(lane) > 0)
        except QueueFull:
            self._waiting.reconsider()
            for env in senders:
                env.rejected += 1
                env.crowded_out = True
            raise
        for env in senders:
            env.crowded_out = False

    def _lane(self, submission: Submission[G]) -> int:
        env = self._envs.find(submission.env_id)
        return NOBODY if env is None else env.env_id

    def remember_undelivered(self, now: float, digest: bytes, receipt: Receipt) -> None:
        """Who submitted the body of `digest` went away before it could be told: the same body gets `receipt`, once."""
        self._undelivered.note(now, digest, receipt)

    # -- what goes out -------------------------------------------------------------------------------------------------

    def batch(self, now: float, *, lease_s: float | None = None) -> Batch[G] | None:
        """The next batch, or None while there is none.

        With `lease_s` it has to be acknowledged within that time, or it is handed out again, before any other.

        Raises:
            NoTrainer: no trainer registered.
        """
        self.expire(now)
        self._check_trainer()
        self._started = True
        while (formed := self._next()) is not None and formed.sequences != self._batch_size:
            self._put_back(formed)  # it was formed for a trainer before this one
        if formed is None:
            return None
        if lease_s is not None:
            return formed.batch(self._outgoing.lend(formed, now + lease_s))
        self._gone(now, formed)
        return formed.batch(None)

    def acknowledge(self, now: float, lease: int) -> Batch[G]:
        """The batch of this lease has arrived: in time, or before anybody else was handed it.

        Raises:
            UnknownLease: it was acknowledged before, or was not in time and was handed out again.
        """
        self.expire(now)
        formed = self._outgoing.end(lease)
        self._gone(now, formed)
        return formed.batch(lease)

    @property
    def outstanding(self) -> int:
        """Batches that were formed and are nobody's for good: ready, out, or come back."""
        return len(self._outgoing)

    def return_batch(self, lease: int) -> None:
        """The batch of this lease never arrived: it goes to the next who asks."""
        self._outgoing.return_batch(lease)

    def _put_back(self, formed: Formed[G]) -> None:
        """Groups of a batch that is none any more are the first of the queue again."""
        self._waiting.put_back(formed.groups)
        for queued in formed.groups:
            self._count_taken(queued.lane, -queued.size)

    def _gone(self, now: float, formed: Formed[G]) -> None:
        for queued in formed.groups:
            self._room.free(now, queued.lane, queued.submission)

    def _next(self) -> Formed[G] | None:
        if (formed := self._outgoing.again() or self._outgoing.newest()) is None:
            self._form()
            formed = self._outgoing.newest()
        return formed

    def _form(self) -> None:
        """Form a batch, if there is one."""
        if (groups := self._waiting.batch(self._batch_size, self._least_now())) is not None:
            for queued in groups:
                self._count_taken(queued.lane, queued.size)
            self._outgoing.form(groups)
            self.step += 1

    def _least_now(self) -> dict[int, int]:
        """One that found no room is not waited for: it would be for ever, for room is made by batches alone."""
        return {
            lane: wanted
            for lane, wanted in self._demands.least.items()
            if lane in self._waiting.queue.lanes or not self._envs.get(lane).crowded_out
        }

    def _count_taken(self, lane: int, sequences: int) -> None:
        if (env := self._envs.find(lane)) is not None:
            env.taken += sequences

    def take(self, now: float) -> Submission[G] | None:
        """The next group for a pipeline, or None while there is none.

        Environments have their parts by weight, and at least their minimum, in sequences: batches, group sizes and
        minima are counted in sequences, and an environment whose sequences are long is not to have fewer for that.
        Whoever has groups waiting gets its part, however many others have; what it did not use it does not save up.
        As `batch` does, it lets environments in.
        """
        self.expire(now)
        self._started = True
        queued = self._waiting.next()
        if queued is None:
            return None
        self._count_taken(queued.lane, queued.size)
        self._room.free(now, queued.lane, queued.submission)
        return queued.submission

    # -- what is to be known -------------------------------------------------------------------------------------------

    def stalls(self) -> list[str]:
        """What will not move by itself: one sentence for each reason."""
        demands = replace(self._demands, least=self._least_now())
        return [*self._stuck.reasons(self._waiting.queue, self._envs.counted(), self._batch_size, demands)]

    def statistics(self, now: float) -> list[EnvStatistics]:
        """Every environment, by id."""
        self.expire(now)
        lanes = self._waiting.queue.lanes
        return [env.statistics(now, lanes[env.env_id].sequences if env.env_id in lanes else 0) for env in self._envs]
