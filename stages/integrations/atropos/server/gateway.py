"""AtroposGateway: environments of Atropos as a source. They talk HTTP to this process; their groups go into a pipeline.

The gateway is their server and, to them, the trainer: it tells them the step, and how many groups wait, those in the
pipeline's channel included. While the pipeline takes nothing the queue fills, environments pause, and what comes still
is asked to come again. A group that was accepted is in the ledger.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.to_thread

from .....pipeline.channels.channel import SendChannel
from .....pipeline.context import Context, current
from .....pipeline.repetitions import mask_of
from .....pipeline.waiting import Waiters
from .....schemas import TrajectoryGroup
from .....schemas.numbers import normalize_counts, normalize_numbers
from ..contract import ScoredData, TrainerRegistration
from ..queue.environments import DEFAULT_HEARTBEAT_TIMEOUT_S
from ..queue.records import Batch, Submission
from ..queue.trajectory_queue import TrajectoryQueue
from ..translation import as_if_sent, from_group, to_group
from .door import Door
from .listening import Listening
from .opening import opened

if TYPE_CHECKING:
    from .hosting import Hosted

__all__ = ["AtroposGateway"]

G = TypeVar("G")

DEFAULT_CAPACITY = 256
"""Groups that may wait before the pipeline takes them: environments pause before, at three batches of their own."""

DEFAULT_CAPACITY_BYTES = 2**30

ENDLESS = 2**31 - 1
"""So many steps are never done."""

STEP_S = 0.5
"""How often it is looked whether the last step is done, while no group comes: nobody tells a source."""

NO_CHECKPOINTS = -1

A_PIPELINE = (
    "this gateway feeds a pipeline, which trains: a trainer that polls needs `penstock gateway`, or AtroposTrainers"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AtroposGateway:
    """Take groups from environments that were written for Atropos; they need nothing but the URL.

    >>> AtroposGateway(batch_size=64, max_token_len=4096).door.port
    8000

    Raises:
        InvalidConfig: naming the field.
    """

    batch_size: int
    """Sequences that a step trains, as environments are told: they pause when three times as many wait."""
    max_token_len: int
    """Tokens of the longest sequence that is trained; environments drop what is as long."""
    num_steps: int | None = None
    """The stream ends when so many optimizer steps are done, those of a run before included; None for no end."""
    door: Door = field(default_factory=Door)
    """Where to listen, and for whom."""
    capacity: int = DEFAULT_CAPACITY
    """Groups that may wait here."""
    capacity_bytes: int = DEFAULT_CAPACITY_BYTES
    """Bytes of those."""
    candidates: int | None = None
    """Width of a teacher's columns, see `to_group`; None for as many as each group has."""
    wandb_group: str = "penstock"
    """Told to environments."""
    wandb_project: str = "penstock"
    """Told to environments."""
    checkpoint_dir: str = ""
    """Told to environments."""
    checkpoint_interval: int = NO_CHECKPOINTS
    """Told to environments: steps between checkpoints of their own; −1 for none."""
    heartbeat_timeout_s: float = DEFAULT_HEARTBEAT_TIMEOUT_S
    """An environment that is not heard of for so long holds nobody back."""
    listening: Listening = field(default_factory=Listening, init=False, repr=False, compare=False)
    """`await gateway.listening.url()` returns where, as soon as it does."""

    def __post_init__(self) -> None:
        normalize_counts(self, "batch_size", "max_token_len", "capacity", "capacity_bytes", "candidates")
        normalize_counts(self, "num_steps", least=0)
        normalize_counts(self, "checkpoint_interval", least=NO_CHECKPOINTS)
        normalize_numbers(self, "heartbeat_timeout_s")

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        """See `Source`.

        Raises:
            InvalidConfig: the host is beyond loopback, and there is no token.
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
        desk = _Intake(context, queue, outbox, self.candidates)
        async with opened(self.door, queue, desk, "AtroposGateway") as gateway:
            with self.listening.at(gateway.url), desk.observed():
                await self._feed(queue, desk, gateway)

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

    async def _feed(
        self, queue: TrajectoryQueue[TrajectoryGroup], desk: _Intake, gateway: Hosted[TrajectoryGroup]
    ) -> None:
        """Hand on what comes, until the last step is done."""
        ledger = desk.context.ledger
        while self.num_steps is None or ledger.step < self.num_steps:
            taken = queue.take(time.monotonic())
            if taken is None:
                await desk.come(None if self.num_steps is None else STEP_S)
                continue
            gateway.endpoints.room.wake_all()
            await desk.send(taken.payload)
            del taken  # it may be large, and the next long in coming


class _Intake:
    """The desk of a source: groups become records as they come, and are admitted when they are accepted."""

    refuses: Mapping[str, str] = dict.fromkeys(("/register", "/batch", "/acknowledge", "/reset_data"), A_PIPELINE)
    takes_groups = True

    def __init__(
        self,
        context: Context,
        queue: TrajectoryQueue[TrajectoryGroup],
        outbox: SendChannel[TrajectoryGroup],
        candidates: int | None,
    ) -> None:
        self.context = context
        self._queue = queue
        self._outbox = outbox
        self._candidates = candidates
        self._incarnation = secrets.token_hex(4)
        """Part of every instance id: no group of a later run has the id of one of this run."""
        self._numbers = itertools.count()
        self._sending = 0
        """Groups that wait for credit: one, or none."""
        self._waiting = Waiters()
        self._told: dict[str, tuple[int, int]] = {}
        """What the metrics were told of each environment: sequences accepted, submissions refused."""

    # -- from HTTP to the queue ----------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The ledger's."""
        return self.context.ledger.step

    @property
    def downstream(self) -> int:
        """See `Desk`; the one that waits for credit is one of them."""
        return self._outbox.statistics().items + self._sending

    def of_scored(self, scored: ScoredData, env: str) -> TrajectoryGroup:
        """A checked group; see `Desk`. Its policy version is that of now, for Atropos tells none."""
        return to_group(
            scored,
            env=env,
            instance_id=f"{self._incarnation}.{next(self._numbers)}",
            policy_version=self.context.ledger.step,
            candidates=self._candidates,
        )

    def of_group(self, group: TrajectoryGroup, env: str) -> TrajectoryGroup:
        """A copy, for the slots are needed; see `Desk`. What its sender says of versions is not believed beyond now."""
        return as_if_sent(group, env=env, policy_version=self.context.ledger.step, candidates=self._candidates)

    def nbytes(self, payload: TrajectoryGroup) -> int:
        """See `Desk`."""
        return payload.nbytes

    def json(self, payload: TrajectoryGroup) -> bytes:
        """See `Desk`."""
        return from_group(payload)

    def arrived(self, submissions: Sequence[Submission[TrajectoryGroup]]) -> None:
        """They are in flight from now on. Of a copy the ledger is told when it is sent on; see `Desk`."""
        ledger = self.context.ledger
        for submission in submissions:
            group = submission.payload
            repetitions = group.repetition_ids.tolist()
            if not ledger.known(group.id) & mask_of(repetitions):
                ledger.admit(group.id, repetitions)
        self._waiting.wake_all()

    def registered(self) -> None:
        """No trainer registers here; see `Desk`."""

    def asked(self, batch: Batch[TrajectoryGroup] | None) -> None:
        """No trainer asks here; see `Desk`."""

    def delivered(self, batch: Batch[TrajectoryGroup]) -> None:
        """No trainer asks here; see `Desk`."""

    # -- from the queue to the pipeline --------------------------------------------------------------------------------

    async def come(self, within_s: float | None) -> None:
        """Wait for a group, `within_s` at most."""
        with anyio.move_on_after(within_s):
            await self._waiting.wait()

    async def send(self, group: TrajectoryGroup) -> None:
        """Hand a group on; while it waits for credit, it counts as waiting."""
        self._sending = 1
        try:
            await self._outbox.send(group)
        finally:
            self._sending = 0

    # -- metrics -------------------------------------------------------------------------------------------------------

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Within the body the metrics of every step tell of each environment."""
        observers = self.context.metrics.observers
        observers.append(self._observe)
        try:
            yield
        finally:
            self._observe()
            observers.remove(self._observe)

    def _observe(self) -> None:
        metrics = self.context.metrics
        for env in self._queue.statistics(time.monotonic()):
            accepted, refused = self._told.get(env.name, (0, 0))
            metrics.total(f"atropos/{env.name}/sequences", env.submitted - accepted)
            metrics.total(f"atropos/{env.name}/refused", env.rejected - refused)
            metrics.gauge(f"atropos/{env.name}/queued", env.queued + env.buffered)
            self._told[env.name] = (env.submitted, env.rejected)
