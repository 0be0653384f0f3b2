"""AtroposGateway: environments of Atropos as a source. They talk HTTP to this process; their groups go into a pipeline.

The gateway acts as their server and their trainer: it reports the step, and the number of groups that wait, those in
the pipeline's channel included. While the pipeline takes no groups the queue fills, environments pause, and further
groups get 503. A group that was accepted is in the ledger. After the last step environments are notified of the end.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio

from ....._pipeline.accounting.repetition_sets import mask_of
from ....._pipeline.accounting.telemetry import Metrics
from ....._pipeline.channels.channel import SendChannel
from ....._pipeline.graph.context import Context, current
from ....._pipeline.graph.stage_info import StageInfo
from ....._pipeline.util.waiting import Waiters
from ....._pipeline.workers.worker_accounting import RUN_ENDED
from ....._schemas import GroupId, TrajectoryGroup
from ....._schemas.numbers import normalize_counts, normalize_numbers
from ..contract import ScoredData, TrainerRegistration
from ..queue.records import Submission
from ..queue.trajectory_queue import DEFAULT_HEARTBEAT_TIMEOUT_S, TrajectoryQueue
from ..translation import as_if_sent, from_group, to_group
from .backend import Backend
from .serve import Listening, open_server
from .server_config import ServerConfig

if TYPE_CHECKING:
    from .endpoints import Endpoints

DEFAULT_CAPACITY = 256
"""Groups that may wait before the pipeline takes them: environments pause earlier, at three batches of their own."""

DEFAULT_CAPACITY_BYTES = 2**30

ENDLESS = 2**31 - 1
"""Number of steps that environments get where there is no last one."""

STEP_POLL_S = 0.5
"""Interval of reading the ledger's step while no group arrives: the ledger does not notify sources."""

NO_CHECKPOINTS = -1

UNAVAILABLE = (
    "this gateway feeds a pipeline, which trains: a trainer that polls needs `penstock gateway`, or AtroposTrainers"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AtroposGateway:
    """Take groups from environments that were written for Atropos; they need only the URL.

    >>> AtroposGateway(batch_size=64, max_token_len=4096).server.port
    8000

    Raises:
        InvalidConfig: naming the field.
    """

    batch_size: int
    """Sequences that a step trains: environments get this number, and pause when three times as many wait."""
    max_token_len: int
    """Tokens of the longest sequence that is trained; environments drop sequences that are as long."""
    num_steps: int | None = None
    """Optimizer steps until the stream ends, those of a previous run included; None for no end."""
    server: ServerConfig = field(default_factory=ServerConfig)
    """Address, access and limits."""
    capacity: int = DEFAULT_CAPACITY
    """Groups that may wait here."""
    capacity_bytes: int = DEFAULT_CAPACITY_BYTES
    """Bytes of those."""
    candidates: int | None = None
    """Width of a teacher's columns, see `to_group`; None for as many as each group has."""
    wandb_group: str = "penstock"
    """Sent to environments."""
    wandb_project: str = "penstock"
    """Sent to environments."""
    checkpoint_dir: str = ""
    """Sent to environments."""
    checkpoint_interval: int = NO_CHECKPOINTS
    """Sent to environments: steps between checkpoints of their own; −1 for no checkpoints."""
    heartbeat_timeout_s: float = DEFAULT_HEARTBEAT_TIMEOUT_S
    """Time without a request until an environment no longer holds others back."""
    departure_timeout_s: float = 5.0
    """Bound on the time after the last step to notify environments, before the gateway stops listening."""
    listening: Listening = field(default_factory=Listening, init=False, repr=False, compare=False)
    """`await gateway.listening.url()` returns the URL as soon as there is one."""

    def stage_info(self) -> StageInfo:
        """State that it reports training to environments."""
        return StageInfo(follows_trajectories=True)

    def __post_init__(self) -> None:
        normalize_counts(self, "batch_size", "max_token_len", "capacity", "capacity_bytes", "candidates")
        normalize_counts(self, "num_steps", least=0)
        normalize_counts(self, "checkpoint_interval", least=NO_CHECKPOINTS)
        normalize_numbers(self, "heartbeat_timeout_s", "departure_timeout_s")

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        """See `Source`.

        Raises:
            InvalidConfig: the host is beyond loopback and there is no token, or the certificate cannot be used.
            MissingExtra: the packages for an HTTP server are not installed.
            OSError: the host is unknown, or the port is taken.
        """
        context = current()
        queue: TrajectoryQueue[TrajectoryGroup] = TrajectoryQueue(
            capacity=self.capacity,
            capacity_bytes=self.capacity_bytes,
            heartbeat_timeout_s=self.heartbeat_timeout_s,
            batches=False,
        )
        queue.register_trainer(self._registration(context.ledger.step))
        backend = _SourceBackend(self, context, outbox)
        try:
            await self._serve(queue, backend, context, outbox)
        finally:
            if backend.complete:
                backend.end_waiting()

    async def _serve(
        self,
        queue: TrajectoryQueue[TrajectoryGroup],
        backend: _SourceBackend,
        context: Context,
        outbox: SendChannel[TrajectoryGroup],
    ) -> None:
        async with open_server(self.server, queue, backend, "AtroposGateway") as running:
            observer = _observer(context.metrics, running.endpoints)
            with self.listening.at(running.url), context.metrics.observing(observer):
                try:
                    await self._feed(backend, running.endpoints)
                finally:
                    if backend.complete:
                        with anyio.CancelScope(shield=True):  # the sink ends with the last step, and cancels this stage
                            await outbox.aclose()
                            await self._notify_environments(running.endpoints)

    def _registration(self, step: int) -> TrainerRegistration:
        return TrainerRegistration(
            wandb_group=self.wandb_group,
            wandb_project=self.wandb_project,
            batch_size=self.batch_size,
            max_token_len=self.max_token_len,
            checkpoint_dir=self.checkpoint_dir,
            save_checkpoint_interval=self.checkpoint_interval,
            starting_step=step,
            num_steps=ENDLESS if self.num_steps is None else self.num_steps,
        )

    async def _feed(self, backend: _SourceBackend, endpoints: Endpoints[TrajectoryGroup]) -> None:
        """Send groups as they arrive, until the last step is done."""
        while not backend.complete:
            taken = endpoints.queue.take(time.monotonic())
            if taken is None:
                with anyio.move_on_after(None if self.num_steps is None else STEP_POLL_S):
                    await backend.arrival.wait()
                continue
            endpoints.room.wake_all()
            await backend.send(taken.payload)
            del taken  # it may be large, and the next may arrive late

    async def _notify_environments(self, endpoints: Endpoints[TrajectoryGroup]) -> None:
        """Wait until every active environment was notified that the run is complete."""
        with anyio.move_on_after(self.departure_timeout_s):
            while any(
                env.active and env.env_id not in endpoints.notified_complete
                for env in endpoints.queue.environments(time.monotonic())
            ):
                await endpoints.room.wait()


class _SourceBackend(Backend[TrajectoryGroup]):
    """Decodes groups as they arrive, and admits them to the ledger when they are accepted."""

    unavailable = dict.fromkeys(("/register", "/batch", "/acknowledge", "/reset_data"), UNAVAILABLE)

    def __init__(self, gateway: AtroposGateway, context: Context, outbox: SendChannel[TrajectoryGroup]) -> None:
        self.arrival = Waiters()
        """Wakes the task that sends."""
        self._num_steps = gateway.num_steps
        self._candidates = gateway.candidates
        self._ledger = context.ledger
        self._outbox = outbox
        self._run_id = secrets.token_hex(4)
        """Part of every instance id, so that ids are unique among runs."""
        self._numbers = itertools.count()
        self._waiting: dict[GroupId, TrajectoryGroup] = {}
        """Groups that were admitted, and not sent on."""
        self._sending = 0
        """Groups that wait for credit: 1 or 0."""

    @property
    def complete(self) -> bool:
        """See `Backend`."""
        return self._num_steps is not None and self._ledger.step >= self._num_steps

    @property
    def step(self) -> int:
        """Step of the ledger."""
        return self._ledger.step

    @property
    def downstream(self) -> int:
        """Groups in the channel; the one that waits for credit is one of them."""
        return self._outbox.statistics().items + self._sending

    def of_scored(self, scored: ScoredData, env: str) -> TrajectoryGroup:
        """Return a checked group. Its policy version is the current one: Atropos sends no version."""
        return to_group(
            scored,
            env=env,
            instance_id=f"{self._run_id}.{next(self._numbers)}",
            policy_version=self._ledger.step,
            candidates=self._candidates,
        )

    def of_group(self, group: TrajectoryGroup, env: str) -> TrajectoryGroup:
        """Return a copy, and free the slots. Policy versions later than the current one are replaced by it."""
        return as_if_sent(group, env=env, policy_version=self._ledger.step, candidates=self._candidates)

    def nbytes(self, payload: TrajectoryGroup) -> int:
        """See `Backend`."""
        return payload.nbytes

    def json(self, payload: TrajectoryGroup) -> bytes:
        """See `Backend`."""
        return from_group(payload)

    def arrived(self, submissions: Sequence[Submission[TrajectoryGroup]]) -> None:
        """Admit them. A copy of a known group is reported to the ledger when it is sent on."""
        for submission in submissions:
            group = submission.payload
            repetitions = group.rollout_ids.tolist()
            if not self._ledger.trajectories.known(group.id) & mask_of(repetitions):
                self._ledger.admit(group.id, repetitions)
                self._waiting[group.id] = group
        self.arrival.wake_all()

    async def send(self, group: TrajectoryGroup) -> None:
        """Send a group on; while it waits for credit, it counts as waiting."""
        self._waiting.pop(group.id, None)
        self._sending = 1
        try:
            await self._outbox.send(group)
        finally:
            self._sending = 0

    def end_waiting(self) -> None:
        """Count the groups without a step left for them: no stage after this one has received them."""
        while self._waiting:
            self._ledger.end(self._waiting.popitem()[1], "unfinished", RUN_ENDED)


# -- metrics -----------------------------------------------------------------------------------------------------------


def _observer(metrics: Metrics, endpoints: Endpoints[TrajectoryGroup]) -> Callable[[], None]:
    """Return a function that adds the groups of each environment since the last call."""
    known: dict[str, tuple[int, int]] = {}

    def observe() -> None:
        for env in endpoints.queue.environments(time.monotonic()):
            refused = sum(endpoints.refusals.counts.get(env.name, {}).values())
            before = known.get(env.name, (0, 0))
            metrics.total(f"atropos/{env.name}/sequences", env.submitted - before[0])
            metrics.total(f"atropos/{env.name}/refused", refused - before[1])
            metrics.gauge(f"atropos/{env.name}/queued", env.queued + env.buffered)
            known[env.name] = (env.submitted, refused)

    return observe
