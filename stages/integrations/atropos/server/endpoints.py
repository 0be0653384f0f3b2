"""What the gateway answers everybody, and environments, from its queue. Knows nothing of who may ask.

Groups are read in a thread where they are large, and enter the queue on the event loop, so the queue have one user.
Whoever went away before it could be told what became of its groups will send them again, and the queue know.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from .....pipeline.waiting import Waiters
from .....schemas import InvalidRecord, TrajectoryGroup
from ..coercion import decode
from ..contract import (
    Buffered,
    Disconnected,
    EnvReference,
    EnvRegistered,
    EnvRegistration,
    Greeting,
    ListReceived,
    Received,
    decode_scored,
)
from ..queue.records import EnvStatus, Info, Receipt, Status, Submission, UnknownEnvironment, WandbInfo
from ..queue.trajectory_queue import TrajectoryQueue
from ..shm.shm_way_in import WayInAnswer
from .answers import Delivery, answered
from .bodies import Bodies
from .desk import Desk
from .intake import Intake
from .prometheus import exposition
from .reading import Reading
from .trainer_endpoints import TrainerEndpoints

__all__ = ["Endpoints"]

G = TypeVar("G")

NO_EXAMPLE = (
    "tokens",
    "masks",
    "scores",
    "advantages",
    "ref_logprobs",
    "generation_params",
    "inference_logprobs",
    "messages",
    "images",
)
"""What `/latest_example` holds, empty, before there is one."""


class _Read(NamedTuple, Generic[G]):
    """What was in a body."""

    submissions: list[Submission[G]]
    digest: bytes


class Endpoints(Generic[G]):
    """One method an endpoint."""

    def __init__(
        self,
        queue: TrajectoryQueue[G],
        desk: Desk[G],
        bodies: Bodies,
        *,
        intake: Intake[G] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.queue = queue
        self.desk = desk
        self.intake = intake
        self._now = clock
        self.room = Waiters()
        """Wakes whoever waits for room in the queue."""
        self._reading = Reading(bodies)
        self.trainers = TrainerEndpoints(queue, desk, self._reading, self.room, clock)
        """Those for trainers."""

    def _in_step(self) -> TrajectoryQueue[G]:
        """The queue, with the step that is now."""
        if self.desk.step is not None:
            self.queue.step = self.desk.step
        return self.queue

    # -- for everybody -------------------------------------------------------------------------------------------------

    async def root(self, _: Request) -> Greeting:
        """GET /."""
        return Greeting(message="AtroposLib API")

    async def status(self, _: Request) -> Status:
        """GET /status."""
        return self._in_step().status(downstream=self.desk.downstream)

    async def info(self, _: Request) -> Info:
        """GET /info."""
        return self.queue.info()

    async def wandb_info(self, _: Request) -> WandbInfo:
        """GET /wandb_info."""
        return self.queue.wandb_info()

    async def latest_example(self, request: Request) -> Response | dict[str, list[Any]]:
        """GET /latest_example."""
        latest = self.queue.latest
        if latest is None:
            return {name: [] for name in NO_EXAMPLE}
        return await self._reading.heavy(latest.nbytes, lambda: answered(request, self.desk.json(latest.payload)))

    async def metrics(self, _: Request) -> Response:
        """GET /metrics."""
        now = self._now()
        queue = self._in_step()
        return PlainTextResponse(exposition(queue.status(), queue.statistics(now), queue.stalls()))

    async def shm(self, _: Request) -> WayInAnswer:
        """GET /shm."""
        assert self.intake is not None  # noqa: S101 (there is no such route without one)
        return WayInAnswer(url=self.intake.url)

    async def reset_data(self, _: Request) -> Response:
        """GET /reset_data."""
        self.queue.reset()
        self.room.wake_all()
        return PlainTextResponse("Reset successful")

    # -- for environments ----------------------------------------------------------------------------------------------

    async def register_env(self, request: Request) -> EnvRegistered:
        """POST /register-env."""
        registration = await self._reading.decoded(request, EnvRegistration)
        admitted = self._in_step().register_env(self._now(), registration)
        if admitted is None:
            return EnvRegistered(status="wait for trainer to start")
        return EnvRegistered(status="success", **asdict(admitted))

    async def disconnect_env(self, request: Request) -> Disconnected:
        """POST /disconnect-env."""
        env_id = (await self._reading.decoded(request, EnvReference)).env_id
        try:
            self.queue.disconnect_env(env_id)
        except UnknownEnvironment as error:
            return Disconnected(status="failure", error=str(error))
        return Disconnected(status="success")

    async def status_env(self, request: Request) -> EnvStatus:
        """GET /status-env, the id in a body or, for what stands between and drops those, in the query."""
        if (asked := request.query_params.get("env_id")) is not None:
            env_id = decode(msgspec.json.encode({"env_id": asked}), EnvReference).env_id
        else:
            env_id = (await self._reading.decoded(request, EnvReference)).env_id
        said = self._in_step().env_status(self._now(), env_id, downstream=self.desk.downstream)
        waiting = self.intake.waiting(env_id) if self.intake is not None else 0
        return replace(said, queue_size=said.queue_size + waiting, self_queue_size=said.self_queue_size + waiting)

    async def scored_data(self, request: Request) -> Delivery:
        """POST /scored_data."""
        read = await self._read(request, many=False)
        receipt = self.accept(read.submissions, digest=read.digest)
        told = Received() if receipt.buffer_size is None else Buffered(buffer_size=receipt.buffer_size)
        return self._receipt(request, read, receipt, told)

    async def scored_data_list(self, request: Request) -> Delivery:
        """POST /scored_data_list."""
        read = await self._read(request, many=True)
        receipt = self.accept(read.submissions, digest=read.digest)
        received = ListReceived(status="received", groups_processed=receipt.groups)
        if receipt.buffer_size is not None:
            received = msgspec.structs.replace(
                received, buffered=receipt.buffered, last_buffer_size=receipt.buffer_size
            )
        return self._receipt(request, read, receipt, received)

    def _receipt(self, request: Request, read: _Read[G], receipt: Receipt, told: Any) -> Delivery:
        """The answer `told`; where nobody is there to read it, the same body will come again."""
        accepted_by = self.queue.incarnation

        def settle(there: bool) -> bool:  # noqa: FBT001
            if not there and accepted_by == self.queue.incarnation:
                self.queue.remember_undelivered(self._now(), read.digest, receipt)
            return there

        return Delivery(answered(request, msgspec.json.encode(told)), settle)

    async def _read(self, request: Request, *, many: bool) -> _Read[G]:
        return await self._reading.read(request, partial(self._submissions, many=many))

    def _submissions(self, plain: bytes, *, many: bool) -> _Read[G]:
        """The groups in a body. May block, and run in a thread."""
        if plain.lstrip()[:1] != (b"[" if many else b"{"):
            raise InvalidRecord(f"body: expected {'a list of groups' if many else 'a group'}, got {plain[:20]!r}…")
        submissions = [
            self._submission(self.desk.of_scored(scored, self._name(scored.env_id)), len(scored.tokens), scored.env_id)
            for scored in decode_scored(plain)
        ]
        return _Read(submissions, hashlib.sha256(plain).digest())

    async def submission_of_group(self, group: TrajectoryGroup, env_id: int | None) -> Submission[G]:
        """A group that came decoded, as the queue take it.

        Raises:
            InvalidRecord: it cannot be trained on.
        """
        return await self._reading.heavy(group.nbytes, partial(self._of_group, group, env_id))

    def _of_group(self, group: TrajectoryGroup, env_id: int | None) -> Submission[G]:
        env = group.env if env_id is None else self._name(env_id)
        return self._submission(self.desk.of_group(group, env), len(group), env_id)

    def _submission(self, payload: G, sequences: int, env_id: int | None) -> Submission[G]:
        return Submission(payload, sequences=sequences, nbytes=self.desk.nbytes(payload), env_id=env_id)

    def _name(self, env_id: int | None) -> str:
        """The name of an environment in the ids of its groups; one for all that did not register."""
        return self.queue.name(env_id) or "atropos"

    def accept(self, submissions: list[Submission[G]], *, digest: bytes | None = None) -> Receipt:
        """Enter groups into the queue, all or none; see `TrajectoryQueue.submit` for what it raises."""
        receipt = self.queue.submit(self._now(), submissions, digest=digest)
        self.desk.arrived([] if receipt.duplicate else submissions)
        return receipt
