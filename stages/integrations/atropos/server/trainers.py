"""AtroposTrainers: trainers that were written for Atropos as the sink of a pipeline. They register, and poll `/batch`.

What a trainer was handed is committed when it acknowledged it, or when it was written to one that acknowledges nothing;
a batch that was neither goes to the next who asks. While nobody asks the pipeline waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from .....pipeline.channels.channel import ReceiveChannel
from .....pipeline.context import current, drop
from .....pipeline.telemetry import get_logger
from .....pipeline.waiting import Waiters
from .....schemas import TrainBatch, TrajectoryGroup
from ....sink_trainer import batch_metrics
from ..contract import ScoredData, TrainerRegistration
from ..queue.records import Batch, Submission, UnpackableGroupSize
from ..queue.trajectory_queue import TrajectoryQueue
from ..translation import from_group
from .door import Door
from .listening import Listening
from .opening import opened

if TYPE_CHECKING:
    from .endpoints import Endpoints
    from .hosting import Hosted

__all__ = ["AtroposTrainers"]

log = get_logger("penstock.atropos")

AHEAD = 2
"""Batches that may wait for a trainer: one that it takes next, and one that is being made. More of them only age."""

LEFT_OVER = 8
"""Batches' worth that may wait and were in none when one was asked for: they may fit with what comes. The oldest beyond
are rejected."""

A_PIPELINE = "this gateway serves groups of a pipeline: environments need `penstock gateway`, or AtroposGateway"


@dataclass(frozen=True, slots=True, kw_only=True)
class AtroposTrainers:
    """Serve groups to trainers that poll. The stream may end before they have all; then it waits until they do.

    Groups whose sizes make up no batch are passed over; what was passed over for long is rejected ("never packed").

    >>> AtroposTrainers().door.port
    8000
    """

    door: Door = field(default_factory=Door)
    """Where to listen, and for whom."""
    listening: Listening = field(default_factory=Listening, init=False, repr=False, compare=False)
    """`await trainers.listening.url()` returns where, as soon as it does."""

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        """See `Sink`. It ends with the stream, or when the trainer has had all its steps.

        Raises:
            InvalidConfig: the host is beyond loopback, and there is no token.
            MissingExtra: the packages for an HTTP server are not installed.
            OSError: the host is unknown, or the port is taken.
        """
        queue: TrajectoryQueue[_Offered] = TrajectoryQueue(capacity=None, capacity_bytes=None)
        desk = _Outlet()
        async with opened(self.door, queue, desk, "AtroposTrainers") as gateway:
            with self.listening.at(gateway.url):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_offer_all, inbox, gateway, desk)
                    await _commit_all(gateway, desk)
                    tasks.cancel_scope.cancel()
        while (left := queue.take(time.monotonic())) is not None:
            drop(left.payload.group, "lost", "no trainer took it")


@dataclass(slots=True, eq=False)
class _Offered:
    """A group in the queue."""

    group: TrajectoryGroup
    """What is needed to commit it."""
    json: bytes
    """As a trainer gets it."""
    number: int = -1
    """Its place in the order in which they were offered; -1 when it is not counted among those that wait: before, and
    when a trainer was handed it, though it wait once more where that did not acknowledge it."""


class _Outlet:
    """The desk of a sink: notes what trainers have, for the task that commits it."""

    refuses: Mapping[str, str] = dict.fromkeys(
        ("/register-env", "/disconnect-env", "/status-env", "/scored_data", "/scored_data_list", "/reset_data"),
        A_PIPELINE,
    )
    takes_groups = False
    step = None
    downstream = 0

    def __init__(self) -> None:
        self.handed: deque[Batch[_Offered]] = deque()
        """Batches that trainers have, and that are not committed."""
        self.changed = Waiters()
        self.ended = False
        """Whether the pipeline sends nothing more."""
        self._starved = False
        """Whether the last who asked got nothing, and nothing came since."""
        self._offered = 0
        """Groups, so far."""
        self._seen = 0
        """So many of those had been offered when somebody last got nothing: the first of them are in no batch."""
        self._fresh = 0
        """Sequences that came since then, and that no trainer was handed."""
        self._left_over = 0
        """Sequences that came before, and that no trainer was handed."""

    def enough(self, trainer: TrainerRegistration | None) -> bool:
        """Whether so much waits that more would only age; before a trainer says what it trains, anything does.

        What makes up no batch is not waited for: more has to come.
        """
        return trainer is None or self._fresh >= AHEAD * trainer.batch_size

    def too_much_left(self, trainer: TrainerRegistration | None) -> bool:
        """Whether so much was passed over that it will not be in a batch any more."""
        return trainer is not None and self._left_over > LEFT_OVER * trainer.batch_size

    def done(self, queue: TrajectoryQueue[_Offered]) -> bool:
        """Whether nobody will get anything more: the trainer has had its steps, or there is no batch left."""
        if queue.outstanding:
            return False
        if queue.trainer is not None and queue.step >= queue.trainer.num_steps:
            return True
        return self.ended and (self._starved or not queue.status().queue_size)

    def of_scored(self, scored: ScoredData, env: str) -> _Offered:
        """No environment sends here; see `Desk`."""
        raise NotImplementedError

    def of_group(self, group: TrajectoryGroup, env: str) -> _Offered:
        """No environment sends here; see `Desk`."""
        raise NotImplementedError

    def nbytes(self, payload: _Offered) -> int:
        """See `Desk`."""
        return len(payload.json)

    def json(self, payload: _Offered) -> bytes:
        """See `Desk`."""
        return payload.json

    def arrived(self, submissions: Sequence[Submission[_Offered]]) -> None:
        """There may be a batch again; see `Desk`."""
        self._starved = False
        for submission in submissions:
            submission.payload.number = self._offered
            self._offered += 1
            self._fresh += submission.sequences

    def registered(self) -> None:
        """What made up no batch of one size may make up one of another; see `Desk`."""
        self._fresh += self._left_over
        self._left_over = self._seen = 0
        self.changed.wake_all()

    def asked(self, batch: Batch[_Offered] | None) -> None:
        """See `Desk`."""
        self._starved = batch is None
        if batch is None:
            self._seen = self._offered
            self._left_over += self._fresh
            self._fresh = 0
        else:
            for submission in batch.groups:
                self.gone(submission)
        self.changed.wake_all()

    def gone(self, submission: Submission[_Offered]) -> None:
        """It waits no more."""
        number, submission.payload.number = submission.payload.number, -1
        if number >= self._seen:
            self._fresh -= submission.sequences
        elif number >= 0:
            self._left_over -= submission.sequences

    def delivered(self, batch: Batch[_Offered]) -> None:
        """See `Desk`."""
        self.handed.append(batch)
        self.changed.wake_all()


async def _offer_all(inbox: ReceiveChannel[TrajectoryGroup], gateway: Hosted[_Offered], desk: _Outlet) -> None:
    async for group in inbox:
        offered = _Offered(_bare(group), await anyio.to_thread.run_sync(from_group, group))
        del group  # its slots are free while a trainer is waited for
        await _offer(offered, gateway.endpoints, desk)
    desk.ended = True
    desk.changed.wake_all()


async def _offer(offered: _Offered, gateway: Endpoints[_Offered], desk: _Outlet) -> None:
    while desk.enough(gateway.queue.trainer):
        await gateway.room.wait()
    while desk.too_much_left(gateway.queue.trainer) and (left := gateway.queue.take(time.monotonic())) is not None:
        desk.gone(left)
        log.warning("group_rejected", reason="no batch could be made with it", sequences=left.sequences)
        drop(left.payload.group, "rejected", "never packed")
    try:
        gateway.accept([Submission(offered, sequences=len(offered.group), nbytes=len(offered.json))])
    except UnpackableGroupSize as error:
        log.warning("group_rejected", reason=str(error))
        drop(offered.group, "rejected", "never packed")


async def _commit_all(gateway: Hosted[_Offered], desk: _Outlet) -> None:
    """Count as trained what trainers have, until there is nothing left that they could get."""
    context = current()
    while True:
        while desk.handed:
            batch = TrainBatch.pack(taken.payload.group for taken in desk.handed.popleft().groups)
            step = context.ledger.step + 1
            context.ledger.commit(batch, step)
            context.metrics.emit(step, batch_metrics(batch, step - 1))
        if desk.done(gateway.endpoints.queue):
            return
        await desk.changed.wait()
        gateway.endpoints.room.wake_all()  # for what was asked for and could not be had, more is to come


def _bare(group: TrajectoryGroup) -> TrajectoryGroup:
    """What is needed to commit it, in private memory."""
    return TrajectoryGroup(
        env=group.env,
        instance_id=group.instance_id,
        tokens=group.tokens,
        offsets=group.offsets,
        loss_mask=group.loss_mask,
        rewards=group.rewards,
        policy_versions=group.policy_versions,
        stop_reasons=group.stop_reasons,
        repetition_ids=group.repetition_ids,
    ).owned()
