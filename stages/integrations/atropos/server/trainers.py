"""AtroposTrainers: trainers that were written for Atropos as the sink of a pipeline. They register, and poll `/batch`.

A batch is committed when the trainer acknowledged it, or when it was written to a trainer without acknowledgements; any
other goes to the next trainer that asks. While no trainer asks the pipeline waits. A trainer polls until the answer is
`{"batch": null}`, and then trains its batches, so the sink continues to answer after the last batch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from ....._pipeline.accounting.telemetry import get_logger
from ....._pipeline.channels.channel import ReceiveChannel
from ....._pipeline.graph.context import current, drop
from ....._pipeline.graph.stage_info import StageInfo
from ....._pipeline.util.waiting import Waiters
from ....._schemas import TrainBatch, TrajectoryGroup
from ....._schemas.numbers import normalize_numbers
from ....sink.sink_trainer import batch_metrics
from ..queue.records import Batch, Submission, UnpackableGroupSize
from ..queue.trajectory_queue import TrajectoryQueue
from ..translation import from_group
from .backend import Backend
from .serve import Listening, open_server
from .server_config import ServerConfig

if TYPE_CHECKING:
    from .endpoints import Endpoints

log = get_logger("penstock.atropos")

AHEAD = 2
"""Batches that may wait for a trainer: one that it takes next, and one that is being made. More would become stale."""

LEFT_OVER = 8
"""Batches' worth of groups that may wait and were in no batch when one was asked for: they may fit with later ones. The
oldest beyond are rejected."""

UNAVAILABLE = "this gateway serves groups of a pipeline: environments need `penstock gateway`, or AtroposGateway"


@dataclass(frozen=True, slots=True, kw_only=True)
class AtroposTrainers:
    """Serve groups to trainers that poll. After the end of the stream it waits until they have received all groups.

    Groups with sizes that make up no batch are passed over, and rejected after too long ("never packed").

    >>> AtroposTrainers().server.port
    8000
    """

    server: ServerConfig = field(default_factory=ServerConfig)
    """Address, access and limits."""
    departure_timeout_s: float = 30.0
    """Bound on the time after the last batch to answer requests of the trainer with no batch."""
    listening: Listening = field(default_factory=Listening, init=False, repr=False, compare=False)
    """`await trainers.listening.url()` returns the URL as soon as there is one."""

    def __post_init__(self) -> None:
        normalize_numbers(self, "departure_timeout_s")

    def stage_info(self) -> StageInfo:
        """State that the trainer's steps are committed."""
        return StageInfo(commits=True)

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        """See `Sink`. It ends with the stream, or when the trainer has received all its steps.

        Raises:
            InvalidConfig: the host is beyond loopback and there is no token, or the certificate cannot be used.
            MissingExtra: the packages for an HTTP server are not installed.
            OSError: the host is unknown, or the port is taken.
        """
        queue: TrajectoryQueue[_Offered] = TrajectoryQueue(capacity=None, capacity_bytes=None)
        backend = _SinkBackend(queue)
        async with open_server(self.server, queue, backend, "AtroposTrainers") as running:
            with self.listening.at(running.url):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_offer_all, inbox, running.endpoints, backend)
                    await _commit_all(running.endpoints, backend)
                    tasks.cancel_scope.cancel()
                with anyio.move_on_after(self.departure_timeout_s):
                    while not backend.trainer_finished:
                        await backend.changed.wait()
        while (left := queue.take(time.monotonic())) is not None:
            drop(left.payload.group, "unfinished", "no trainer took it")


@dataclass(slots=True, eq=False)
class _Offered:
    """A group in the queue."""

    group: TrajectoryGroup
    """Its columns that are needed to commit it."""
    json: bytes
    """The group in the form of /batch."""
    number: int = -1
    """Its place in the order of offered groups; −1 before that and once it was sent to a trainer, also if it waits
    again because that trainer did not acknowledge it."""


class _SinkBackend(Backend[_Offered]):
    """Records the batches that trainers have, for the task that commits, and the groups that wait, for the other."""

    unavailable = dict.fromkeys(
        ("/register-env", "/disconnect-env", "/status-env", "/scored_data", "/scored_data_list", "/reset_data"),
        UNAVAILABLE,
    )
    takes_groups = False

    def __init__(self, queue: TrajectoryQueue[_Offered]) -> None:
        self.uncommitted: deque[Batch[_Offered]] = deque()
        """Batches that trainers have, and that are not committed."""
        self.changed = Waiters()
        self.ended = False
        """True once the stream of the pipeline has ended."""
        self._queue = queue
        self._acknowledges = False
        """True if the trainer acknowledged the last batch; one that does not collects all there are."""
        self._answered_null = False
        """True if the last request was answered with no batch."""
        self._offered = 0
        """Groups offered so far."""
        self._seen = 0
        """Value of `_offered` when a request was last answered with no batch: the groups before made up no batch."""
        self._fresh = 0
        """Sequences offered since then and sent to no trainer."""
        self._left_over = 0
        """Sequences offered before and sent to no trainer."""

    @property
    def full(self) -> bool:
        """True while so much waits that more would only become stale; groups that make up no batch do not count."""
        trainer = self._queue.trainer
        return trainer is None or self._fresh >= AHEAD * trainer.batch_size

    @property
    def overfull(self) -> bool:
        """True while so much was passed over that the oldest will be in no batch."""
        trainer = self._queue.trainer
        return trainer is not None and self._left_over > LEFT_OVER * trainer.batch_size

    @property
    def complete(self) -> bool:
        """True once no trainer gets another batch: its steps are done, or no batch is left. See `Backend`."""
        if self._queue.outstanding:
            return False
        return self._steps_done or (self.ended and (self._starved or not self._queue.status().queue_size))

    @property
    def trainer_finished(self) -> bool:
        """True once no trainer asks again: it never registered, it acknowledges, or its last answer was null."""
        return self._queue.trainer is None or self._acknowledges or (self._steps_done and self._answered_null)

    @property
    def _starved(self) -> bool:
        """True if the last request was answered with no batch, and no group was offered since."""
        return self._answered_null and self._seen == self._offered

    @property
    def _steps_done(self) -> bool:
        trainer = self._queue.trainer
        return trainer is not None and self._queue.step >= trainer.num_steps

    def nbytes(self, payload: _Offered) -> int:
        """See `Backend`."""
        return len(payload.json)

    def json(self, payload: _Offered) -> bytes:
        """See `Backend`."""
        return payload.json

    def arrived(self, submissions: Sequence[Submission[_Offered]]) -> None:
        """Count them: a batch may be possible again."""
        for submission in submissions:
            submission.payload.number = self._offered
            self._offered += 1
            self._fresh += submission.sequences

    def registered(self) -> None:
        """Count all groups as fresh: groups that made up no batch of one size may make up one of another."""
        self._fresh += self._left_over
        self._left_over = self._seen = 0
        self.changed.wake_all()

    def asked(self, batch: Batch[_Offered] | None) -> None:
        """See `Backend`."""
        self._answered_null = batch is None
        if batch is None:
            self._seen = self._offered
            self._left_over += self._fresh
            self._fresh = 0
        else:
            for submission in batch.groups:
                self.remove(submission)
        self.changed.wake_all()

    def remove(self, submission: Submission[_Offered]) -> None:
        """Take a group that no longer waits off the counts."""
        number, submission.payload.number = submission.payload.number, -1
        if number >= self._seen:
            self._fresh -= submission.sequences
        elif number >= 0:
            self._left_over -= submission.sequences

    def delivered(self, batch: Batch[_Offered], *, acknowledged: bool) -> None:
        """See `Backend`."""
        self._acknowledges = acknowledged
        self.uncommitted.append(batch)
        self.changed.wake_all()


async def _offer_all(
    inbox: ReceiveChannel[TrajectoryGroup], endpoints: Endpoints[_Offered], backend: _SinkBackend
) -> None:
    async for group in inbox:
        committable = _committable(group)
        try:
            offered = _Offered(committable, await anyio.to_thread.run_sync(from_group, group))
            del group  # frees its slots while no trainer asks
            await _offer(offered, endpoints, backend)
        except anyio.get_cancelled_exc_class():
            drop(committable, "unfinished", "no trainer took it")
            raise
    backend.ended = True
    backend.changed.wake_all()


async def _offer(offered: _Offered, endpoints: Endpoints[_Offered], backend: _SinkBackend) -> None:
    while backend.full:
        await endpoints.room.wait()
    while backend.overfull and (left := endpoints.queue.take(time.monotonic())) is not None:
        backend.remove(left)
        log.warning("group_rejected", reason="no batch could be made with it", sequences=left.sequences)
        drop(left.payload.group, "rejected", "never packed")
    try:
        endpoints.accept([Submission(offered, sequences=len(offered.group), nbytes=len(offered.json))])
    except UnpackableGroupSize as error:
        log.warning("group_rejected", reason=str(error))
        drop(offered.group, "rejected", "never packed")


async def _commit_all(endpoints: Endpoints[_Offered], backend: _SinkBackend) -> None:
    """Commit the batches that trainers have, until no further batch can be sent."""
    context = current()
    while True:
        while backend.uncommitted:
            batch = TrainBatch.pack(taken.payload.group for taken in backend.uncommitted.popleft().groups)
            step = context.ledger.step + 1
            context.ledger.commit(batch, step)
            context.metrics.emit(step, batch_metrics(batch, step - 1))
        if backend.complete:
            return
        await backend.changed.wait()
        endpoints.room.wake_all()  # the request got no batch: more groups are to be offered


def _committable(group: TrajectoryGroup) -> TrajectoryGroup:
    """Return the columns that are needed to commit a group, in private memory."""
    return TrajectoryGroup(
        env=group.env,
        instance_id=group.instance_id,
        tokens=group.tokens,
        offsets=group.offsets,
        loss_mask=group.loss_mask,
        rewards=group.rewards,
        policy_versions=group.policy_versions,
        stop_reasons=group.stop_reasons,
        rollout_ids=group.rollout_ids,
    ).owned()
