"""The endpoints of a gateway, for environments and for trainers. Knows neither access nor sockets.

Large bodies are decoded and encoded in threads; groups enter the queue on the event loop, so the queue has one user.
Every batch is under a lease. For a trainer that asked for no lease the server ends it, and only then sends the end of
the batch. A trainer that has disconnected by then has a truncated batch, and the next has it whole.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Hashable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from http import HTTPStatus
from typing import Any, Generic, NamedTuple, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from ....._pipeline.errors import PenstockError
from ....._pipeline.util.waiting import Waiters
from ....._schemas import InvalidRecord, TrajectoryGroup
from ....http.limits import Bodies, BodyRefused, Limits, RequestRejections
from ..contract import EnvReference, EnvRegistration, TrainerRegistration, Untrainable, decode, decode_scored
from ..queue.records import (
    Batch,
    EnvStatus,
    Info,
    NoTrainer,
    Receipt,
    RequestRejected,
    Submission,
    UnknownEnvironment,
    UnknownLease,
    WandbInfo,
)
from ..queue.trajectory_queue import TrajectoryQueue
from .backend import Backend

G = TypeVar("G")
T = TypeVar("T")

THREADS = 2
"""Groups that are decoded, or batches that are encoded, at once beside the event loop: each may hold a hundred MB."""

PIPELINE_BACKLOG = 8
"""Groups that may wait for a pipeline before senders wait for it. It takes one in a turn of the event loop."""

PIPELINE_TURNS = 16
"""Bound on the turns of the event loop that a sender waits: a pipeline that is slower than that lets the queue fill."""

LARGE_BYTES = 256 * 1024
"""Larger bodies take more than a millisecond or two: a thread processes them, and /status-env is answered meanwhile."""

END_BYTES = 64
"""Length of the end of a batch, sent last: without it neither JSON nor gzip can be read."""

SENDING_TIMEOUT_S = 60.0
"""Bound on the time a batch takes to a trainer without a lease; then the next trainer that asks gets it whole."""

MAX_LEASE_S = 86_400
"""A day: the longest wait for a trainer that died."""

COMPLETE_QUEUE = 10**9
"""Groups that /status-env reports once the run is complete. An environment stops when its step and the batches in the
queue exceed its own `total_steps`; with this it stops at its next request."""

EXAMPLE_KEYS = ("tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params", "inference_logprobs")
"""Keys of /latest_example, all empty, before there is one."""


class Acknowledgement(msgspec.Struct, frozen=True):
    """POST /acknowledge."""

    lease: int


class _Received(NamedTuple, Generic[G]):
    """The groups in a body."""

    submissions: list[Submission[G]]
    rejected: list[tuple[int | None, PenstockError]]
    """Groups that cannot be trained on: env_id and reason."""
    digest: int
    """Hash of the body, keyed for this process."""


class RunComplete(RequestRejected):
    """A group came after the last step."""

    status = HTTPStatus.CONFLICT


class _Invalid(InvalidRecord):
    """A body is not scored data."""

    def __init__(self, message: str, env_id: int | None) -> None:
        super().__init__(message)
        self.env_id = env_id


class SharedMemory(NamedTuple):
    """The other entrance of groups."""

    url: str
    """Address that environments connect to."""
    waiting: Callable[[int], int]
    """Returns the number of groups of an environment that arrived and are not in the queue."""


class Endpoints(Generic[G]):
    """One method for each endpoint."""

    def __init__(
        self,
        queue: TrajectoryQueue[G],
        backend: Backend[G],
        limits: Limits,
        refusals: RequestRejections,
        *,
        shared: SharedMemory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.queue = queue
        self.backend = backend
        self.shared = shared
        self.refusals = refusals
        self.room = Waiters()
        """Wakes tasks that wait for room in the queue, or until environments are notified of the end."""
        self.notified_complete = set[int]()
        """Ids of environments that were notified that the run is complete."""
        self._now = clock
        self._bodies = Bodies(limits)
        self._threads = anyio.CapacityLimiter(THREADS)

    def _current_queue(self) -> TrajectoryQueue[G]:
        if self.backend.step is not None:
            self.queue.step = self.backend.step
        return self.queue

    # -- for all clients -----------------------------------------------------------------------------------------------

    async def root(self, _: Request) -> Any:
        """GET /."""
        return {"message": "AtroposLib API"}

    async def status(self, _: Request) -> Any:
        """GET /status; the original has the first two keys."""
        queue = self._current_queue()
        return {
            **asdict(queue.status(downstream=self.backend.downstream)),
            "environments": [env.counters() for env in queue.environments(self._now())],
            "refused": self.refusals.counts,
            "stalls": queue.stalls(),
        }

    async def info(self, _: Request) -> Info:
        """GET /info."""
        return self.queue.info()

    async def wandb_info(self, _: Request) -> WandbInfo:
        """GET /wandb_info."""
        return self.queue.wandb_info()

    async def latest_example(self, _: Request) -> Any:
        """GET /latest_example."""
        latest = self.queue.latest
        if latest is None:
            return {key: [] for key in (*EXAMPLE_KEYS, "messages", "images")}
        return _json(await self._offload(latest.nbytes, partial(self.backend.json, latest.payload)))

    async def shm(self, _: Request) -> Any:
        """GET /shm."""
        assert self.shared is not None  # noqa: S101 (there is no such route without one)
        return {"url": self.shared.url}

    async def reset_data(self, _: Request) -> Response:
        """GET /reset_data."""
        self.queue.reset()
        self.room.wake_all()
        return PlainTextResponse("Reset successful")

    # -- for environments ----------------------------------------------------------------------------------------------

    async def register_env(self, request: Request) -> Any:
        """POST /register-env."""
        registration = await self._decoded(request, EnvRegistration)
        admitted = self._current_queue().register_env(self._now(), registration)
        if admitted is None:
            return {"status": "wait for trainer to start"}
        return {"status": "success", **asdict(admitted)}

    async def disconnect_env(self, request: Request) -> Any:
        """POST /disconnect-env."""
        env_id = (await self._decoded(request, EnvReference)).env_id
        try:
            self.queue.disconnect_env(env_id)
        except UnknownEnvironment as error:
            return {"status": "failure", "error": str(error)}
        self.room.wake_all()
        return {"status": "success"}

    async def status_env(self, request: Request) -> EnvStatus:
        """GET /status-env, the id in a body or, where a proxy drops those, in the query."""
        if (asked := request.query_params.get("env_id")) is not None:
            env_id = decode(msgspec.json.encode({"env_id": asked}), EnvReference).env_id
        else:
            env_id = (await self._decoded(request, EnvReference)).env_id
        status = self._current_queue().env_status(self._now(), env_id, downstream=self.backend.downstream)
        waiting = self.shared.waiting(env_id) if self.shared is not None else 0
        if self.backend.complete:
            self.notified_complete.add(env_id)
            self.room.wake_all()
            waiting = COMPLETE_QUEUE
        return replace(status, queue_size=status.queue_size + waiting, self_queue_size=status.self_queue_size + waiting)

    async def scored_data(self, request: Request) -> Any:
        """POST /scored_data."""
        received, receipt = await self._submit(request, many=False)
        if receipt.buffer_size is not None:
            return {"status": "buffered", "buffer_size": receipt.buffer_size}
        return {"status": "received", **_reasons(received)}

    async def scored_data_list(self, request: Request) -> Any:
        """POST /scored_data_list."""
        received, receipt = await self._submit(request, many=True)
        answer = {"status": "received", "groups_processed": len(received.submissions) + len(received.rejected)}
        if receipt.buffer_size is not None:
            answer |= {"buffered": receipt.buffered, "last_buffer_size": receipt.buffer_size}
        return {**answer, **_reasons(received)}

    async def _submit(self, request: Request, *, many: bool) -> tuple[_Received[G], Receipt]:
        """Enter the groups of a request that can be trained on into the queue, all at once."""
        try:
            received = await self._read(request, partial(self._received, many=many))
        except (InvalidRecord, BodyRefused, HTTPException) as error:
            self.refuse(getattr(error, "env_id", None), error)
            raise
        for env_id, reason in received.rejected:
            self.refuse(env_id, reason)
        key = request.headers.get("idempotency-key")
        digest: Hashable = received.digest if key is None else hashlib.sha256(key.encode()).digest()
        try:
            receipt = self.accept(received.submissions, digest=digest)
        except RequestRejected as error:
            for submission in received.submissions:
                self.refuse(submission.env_id, error)
            raise
        accepted_by = self.queue.restart
        await self.let_pipeline_take()
        if (key is not None or await request.is_disconnected()) and accepted_by == self.queue.restart:
            self.queue.remember_undelivered(self._now(), digest, receipt)  # the same submission may be repeated
        return received, receipt

    async def let_pipeline_take(self) -> None:
        """Wait a few turns of the event loop while groups wait for a pipeline.

        It takes one a turn, while many may arrive: the queue would be full and the pipeline not.
        """
        for _ in range(PIPELINE_TURNS):
            if self.queue.batches or self.queue.waiting <= PIPELINE_BACKLOG:
                return
            await anyio.lowlevel.checkpoint()

    def _received(self, plain: bytes, *, many: bool) -> _Received[G]:
        """Return the groups in a body. May block, and run in a thread."""
        if plain.lstrip()[:1] != (b"[" if many else b"{"):
            raise InvalidRecord(f"body: expected {'a list of groups' if many else 'a group'}, got {plain[:20]!r}…")
        try:
            groups = decode_scored(plain)
        except InvalidRecord as error:
            raise _Invalid(str(error), _sender(plain)) from None
        received: _Received[G] = _Received([], [], hash(plain))
        for scored in groups:
            try:
                payload = self.backend.of_scored(scored, self._name(scored.env_id))
                received.submissions.append(self._submission(payload, len(scored.tokens), scored.env_id))
            except (Untrainable, RequestRejected) as error:
                received.rejected.append((scored.env_id, error))
        return received

    async def submission_of_group(self, group: TrajectoryGroup, env_id: int | None) -> Submission[G]:
        """Return a group that arrived decoded, in the form of the queue.

        Raises:
            Untrainable: it cannot be trained on.
            RequestRejected: no batch can hold it, or the run is complete.
        """
        env = group.env if env_id is None else self._name(env_id)
        payload = await self._offload(group.nbytes, partial(self.backend.of_group, group, env))
        return self._submission(payload, len(group), env_id)

    def _submission(self, payload: G, sequences: int, env_id: int | None) -> Submission[G]:
        self.queue.check_size(sequences)
        if self.backend.complete:
            raise RunComplete("the run is complete: no more groups are trained")
        return Submission(payload, sequences=sequences, nbytes=self.backend.nbytes(payload), env_id=env_id)

    def _name(self, env_id: int | None) -> str:
        """Return the name of an environment in the ids of its groups; one for all that did not register."""
        return self.queue.name(env_id) or "atropos"

    def accept(self, submissions: list[Submission[G]], *, digest: Hashable = None) -> Receipt:
        """Enter groups into the queue together; see `TrajectoryQueue.submit` for its errors."""
        receipt = self.queue.submit(self._now(), submissions, digest=digest)
        self.backend.arrived([] if receipt.duplicate else submissions)
        return receipt

    def refuse(self, env_id: int | None, error: Exception) -> None:
        """Count a group of an environment that is not trained; log it unless the reason is the end of the run."""
        env = self.queue.name(env_id)
        if isinstance(error, RunComplete):
            self.refusals.count(env, "RunComplete")
            return
        match error:
            case Untrainable(fault=fault):
                kind: str = fault
            case InvalidRecord():
                kind = "invalid"
            case BodyRefused(status=status) | HTTPException(status_code=status):
                kind = f"http_{int(status)}"
            case _:
                kind = type(error).__name__
        self.refusals.add(env, kind, str(error))

    # -- for trainers --------------------------------------------------------------------------------------------------

    async def register(self, request: Request) -> Any:
        """POST /register."""
        uuid = self.queue.register_trainer(await self._decoded(request, TrainerRegistration))
        self.backend.registered()
        self.room.wake_all()
        return {"uuid": uuid}

    async def batch(self, request: Request) -> Any:
        """GET /batch; with `?lease_s=…` the batch has to be acknowledged within that time."""
        lease_s = _lease_s(request.query_params.get("lease_s"))
        if await request.is_disconnected():
            raise ClientDisconnect
        try:
            batch = (
                None if self.backend.complete else self.queue.batch(self._now(), lease_s=lease_s or SENDING_TIMEOUT_S)
            )
        except NoTrainer:
            return {"status": "error", "message": "Trainer not registered. Call /register first.", "batch": []}
        self.backend.asked(batch)
        if batch is None:
            return {"batch": None}
        self.room.wake_all()
        weight = sum(group.nbytes for group in batch.groups)
        answer = await self._offload(weight, partial(self._batch, batch, leased=lease_s is not None))
        return _Delivery(answer, partial(self._settle, batch, leased=lease_s is not None))

    def _batch(self, batch: Batch[G], *, leased: bool) -> bytes:
        """Return the answer that holds `batch`. May block, and run in a thread."""
        answer: dict[str, Any] = {"batch": [msgspec.Raw(self.backend.json(group.payload)) for group in batch.groups]}
        if leased:
            answer |= {"lease": str(batch.lease), "batch_id": batch.batch_id}
        return msgspec.json.encode(answer)

    def _settle(self, batch: Batch[G], connected: bool, *, leased: bool) -> bool:  # noqa: FBT001
        """Return whether to send the end of the batch; end the lease of a trainer that asked for none."""
        if not connected:
            self.queue.return_batch(batch.lease)
            return False
        if leased:
            return True
        with suppress(UnknownLease):  # it took longer than SENDING_TIMEOUT_S, and another has the batch
            self._end_lease(batch.lease, acknowledged=False)
            return True
        return False

    async def acknowledge(self, request: Request) -> Any:
        """POST /acknowledge."""
        self._end_lease((await self._decoded(request, Acknowledgement)).lease, acknowledged=True)
        return {"status": "success"}

    def _end_lease(self, lease: int, *, acknowledged: bool) -> None:
        batch = self.queue.acknowledge(self._now(), lease)
        self.room.wake_all()
        self.backend.delivered(batch, acknowledged=acknowledged)

    # -- bodies --------------------------------------------------------------------------------------------------------

    async def _decoded(self, request: Request, wanted: type[T]) -> T:
        return await self._read(request, partial(decode, wanted=wanted))

    async def _read(self, request: Request, work: Callable[[bytes], T]) -> T:
        """Return `work` of a body, inflated first if it is compressed."""
        async with self._json_body(request) as body:
            if "gzip" not in request.headers.get("content-encoding", "").lower():
                return await self._offload(len(body), partial(work, body))
            return await self._offload(self._bodies.inflated_bytes(body), lambda: work(self._bodies.inflate(body)))

    @asynccontextmanager
    async def _json_body(self, request: Request) -> AsyncGenerator[bytes]:
        """Yield a body declared as JSON: a web page may send that to its own server only."""
        async with self._bodies.read(request) as body:
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
                raise InvalidRecord(f"body: expected Content-Type: application/json, got {kind or 'none'}")
            yield body

    async def _offload(self, weight: int, work: Callable[[], T]) -> T:
        """Return the result of `work`, run in a thread if `weight`, in bytes, is large."""
        if weight < LARGE_BYTES:
            return work()
        return await anyio.to_thread.run_sync(work, limiter=self._threads)


@dataclass(frozen=True, slots=True)
class _Delivery:
    """The answer that holds a batch; its end is sent only to a trainer that is still connected."""

    body: bytes
    settle: Callable[[bool], bool]
    """Takes True if the client was connected when all but the end was written; returns True if the end may be sent."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. A client that disconnected has a truncated answer, and can detect that."""
        end = max(0, len(self.body) - END_BYTES)
        headers = _json(self.body).raw_headers
        connected = complete = False
        try:
            await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": headers})
            await send({"type": "http.response.body", "body": self.body[:end], "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": True})  # waits until that was written
            connected = not await Request(scope, receive).is_disconnected()
        finally:
            complete = self.settle(connected)
        if complete:
            await send({"type": "http.response.body", "body": self.body[end:]})


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _reasons(received: _Received[Any]) -> dict[str, list[str]]:
    """Return the reasons for groups of a request that are not trained on, for its answer."""
    reasons = [str(error) for _, error in received.rejected]
    return {"rejected": reasons} if reasons else {}


def _sender(body: bytes) -> int | None:
    """Return the id of the environment that sent an invalid body, where it can be read."""
    with suppress(InvalidRecord):
        return decode(body, EnvReference).env_id
    return None


def _lease_s(asked: str | None) -> float | None:
    if asked is None:
        return None
    try:
        lease_s = float(asked)
    except ValueError:
        lease_s = 0.0
    if not 0 < lease_s <= MAX_LEASE_S:
        raise InvalidRecord(f"lease_s: expected seconds above 0, and at most {MAX_LEASE_S}, got {asked!r}")
    return lease_s
