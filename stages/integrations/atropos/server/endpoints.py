"""What the gateway answers at each endpoint of the contract, from its books. Knows nothing of who may ask.

Groups are read in a thread where they are large, and enter the books on the event loop, so the books have one user.
Whoever went away before it could be told what became of its groups will send them again, and the books know.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import anyio
import anyio.to_thread
import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response

from .....pipeline.waiting import Waiters
from .....schemas import InvalidRecord, TrajectoryGroup
from ..books.errors import NoTrainer, UnknownEnvironment, UnknownLease
from ..books.records import Batch, EnvStatus, Info, Receipt, Status, Submission, WandbInfo
from ..books.state import Books
from ..contract import (
    BatchAnswer,
    Buffered,
    Disconnected,
    EnvReference,
    EnvRegistered,
    EnvRegistration,
    Greeting,
    ListReceived,
    Received,
    Registered,
    TrainerRegistration,
    decode_request,
    decode_scored,
)
from ..shm.shm_way_in import WayInAnswer
from .answers import END_BYTES, LARGE_BYTES, Delivery, answered
from .bodies import Bodies
from .desk import Desk
from .intake import Intake
from .prometheus import exposition

__all__ = ["Endpoints"]

G = TypeVar("G")
T = TypeVar("T")

THREADS = 2
"""Groups that are read, or batches that are written, at once beside the event loop: each may hold a hundred MB."""

SENDING_S = 60.0
"""How long a batch may be under way to a trainer that acknowledges nothing; then it goes to the next who asks, and the
end of it to nobody else."""

LONGEST_LEASE_S = 86_400
"""A day. A trainer that died is not waited for any longer."""

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


class Acknowledgement(msgspec.Struct, frozen=True):
    """POST /acknowledge."""

    lease: int


class _Read(NamedTuple, Generic[G]):
    """What was in a body."""

    submissions: list[Submission[G]]
    digest: bytes


class Endpoints(Generic[G]):
    """One method an endpoint."""

    def __init__(
        self,
        books: Books[G],
        desk: Desk[G],
        bodies: Bodies,
        *,
        intake: Intake[G] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.books = books
        self.desk = desk
        self._bodies = bodies
        self.intake = intake
        self._now = clock
        self.room = Waiters()
        """Wakes whoever waits for room in the books."""
        self._threads = anyio.CapacityLimiter(THREADS)

    # -- reading requests ----------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _body(self, request: Request) -> AsyncGenerator[tuple[bytes, bool]]:
        """What was sent, and whether it is gzip.

        Raises:
            InvalidRecord: it is not said to be JSON, which is what a web page may send to another server unasked.
        """
        async with self._bodies.read(request, request.headers.get("content-length")) as body:
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
                raise InvalidRecord(f"body: expected Content-Type: application/json, got {kind or 'none'}")
            yield body, "gzip" in request.headers.get("content-encoding", "").lower()

    async def _decoded(self, request: Request, wanted: type[T]) -> T:
        async with self._body(request) as (body, compressed):
            return await self._unpacked(body, compressed, lambda plain: decode_request(plain, wanted))

    async def _unpacked(self, body: bytes, compressed: bool, work: Callable[[bytes], T]) -> T:  # noqa: FBT001
        """What `work` returns of a body; done in a thread where it is large."""
        if not compressed:
            return await self.heavy(len(body), lambda: work(body))
        return await self.heavy(self._bodies.inflated_bytes(body), lambda: work(self._bodies.inflate(body)))

    async def heavy(self, weight: int, work: Callable[[], T]) -> T:
        """What `work` returns; done in a thread where it takes long."""
        if weight < LARGE_BYTES:
            return work()
        return await anyio.to_thread.run_sync(work, limiter=self._threads)

    def _in_step(self) -> Books[G]:
        """The books, with the step that is now."""
        if self.desk.step is not None:
            self.books.step = self.desk.step
        return self.books

    # -- for everybody -------------------------------------------------------------------------------------------------

    async def root(self, _: Request) -> Greeting:
        """GET /."""
        return Greeting(message="AtroposLib API")

    async def status(self, _: Request) -> Status:
        """GET /status."""
        return self._in_step().status(downstream=self.desk.downstream)

    async def info(self, _: Request) -> Info:
        """GET /info."""
        return self.books.info()

    async def wandb_info(self, _: Request) -> WandbInfo:
        """GET /wandb_info."""
        return self.books.wandb_info()

    async def latest_example(self, request: Request) -> Response | dict[str, list[Any]]:
        """GET /latest_example."""
        latest = self.books.latest
        if latest is None:
            return {name: [] for name in NO_EXAMPLE}
        return await self.heavy(latest.nbytes, lambda: answered(request, self.desk.json(latest.payload)))

    async def metrics(self, _: Request) -> Response:
        """GET /metrics."""
        now = self._now()
        books = self._in_step()
        return PlainTextResponse(exposition(books.status(), books.statistics(now), books.stuck()))

    async def shm(self, _: Request) -> WayInAnswer:
        """GET /shm."""
        assert self.intake is not None  # noqa: S101 (there is no such route without one)
        return WayInAnswer(url=self.intake.url)

    async def reset_data(self, _: Request) -> Response:
        """GET /reset_data."""
        self.books.reset()
        self.room.wake_all()
        return PlainTextResponse("Reset successful")

    # -- for environments ----------------------------------------------------------------------------------------------

    async def register_env(self, request: Request) -> EnvRegistered:
        """POST /register-env."""
        registration = await self._decoded(request, EnvRegistration)
        admitted = self._in_step().register_env(self._now(), registration)
        if admitted is None:
            return EnvRegistered(status="wait for trainer to start")
        return EnvRegistered(status="success", **asdict(admitted))

    async def disconnect_env(self, request: Request) -> Disconnected:
        """POST /disconnect-env."""
        env_id = (await self._decoded(request, EnvReference)).env_id
        try:
            self.books.disconnect_env(env_id)
        except UnknownEnvironment as error:
            return Disconnected(status="failure", error=str(error))
        return Disconnected(status="success")

    async def status_env(self, request: Request) -> EnvStatus:
        """GET /status-env, the id in a body or, for what stands between and drops those, in the query."""
        if (asked := request.query_params.get("env_id")) is not None:
            env_id = decode_request(msgspec.json.encode({"env_id": asked}), EnvReference).env_id
        else:
            env_id = (await self._decoded(request, EnvReference)).env_id
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
        accepted_by = self.books.incarnation

        def settle(there: bool) -> bool:  # noqa: FBT001
            if not there and accepted_by == self.books.incarnation:
                self.books.undelivered(self._now(), read.digest, receipt)
            return there

        return Delivery(answered(request, msgspec.json.encode(told)), settle)

    async def _read(self, request: Request, *, many: bool) -> _Read[G]:
        async with self._body(request) as (body, compressed):
            return await self._unpacked(body, compressed, partial(self._submissions, many=many))

    def _submissions(self, plain: bytes, *, many: bool) -> _Read[G]:
        """The groups in a body. May block, and run in a thread."""
        if plain.lstrip()[:1] != (b"[" if many else b"{"):
            raise InvalidRecord(f"body: expected {'a list of groups' if many else 'a group'}, got {plain[:20]!r}…")
        submissions = [
            self._submission(self.desk.of_scored(scored, self._name(scored.env_id)), len(scored.tokens), scored.env_id)
            for scored in decode_scored(plain)
        ]
        return _Read(submissions, hashlib.sha256(plain).digest())

    def submission_of_group(self, group: TrajectoryGroup, env_id: int | None) -> Submission[G]:
        """A group that came decoded, as the books take it. May block, and run in a thread."""
        env = group.env if env_id is None else self._name(env_id)
        return self._submission(self.desk.of_group(group, env), len(group), env_id)

    def _submission(self, payload: G, sequences: int, env_id: int | None) -> Submission[G]:
        return Submission(payload, sequences=sequences, nbytes=self.desk.nbytes(payload), env_id=env_id)

    def _name(self, env_id: int | None) -> str:
        """The name of an environment in the ids of its groups; one for all that did not register."""
        return self.books.name(env_id) or "atropos"

    def accept(self, submissions: list[Submission[G]], *, digest: bytes | None = None) -> Receipt:
        """Enter groups into the books, all or none; see `Books.submit` for what it raises."""
        receipt = self.books.submit(self._now(), submissions, digest=digest)
        self.desk.arrived([] if receipt.again else submissions)
        return receipt

    # -- for trainers --------------------------------------------------------------------------------------------------

    async def register(self, request: Request) -> Registered:
        """POST /register."""
        registration = await self._decoded(request, TrainerRegistration)
        uuid = self.books.register_trainer(registration)
        self.room.wake_all()
        return Registered(uuid=uuid)

    async def batch(self, request: Request) -> Response | Delivery | BatchAnswer:
        """GET /batch; with `?lease_s=…` the batch has to be acknowledged within that time."""
        lease_s = _lease_s(request.query_params.get("lease_s"))
        if await request.is_disconnected():
            raise ClientDisconnect
        try:
            batch = self.books.batch(self._now(), lease_s=lease_s or SENDING_S)
        except NoTrainer:
            told = "Trainer not registered. Call /register first."
            return BatchAnswer(status="error", message=told, batch=[])
        self.desk.asked(batch)
        if batch is None:
            return BatchAnswer(batch=None)
        self.room.wake_all()
        weight = sum(group.nbytes for group in batch.groups)
        answer = await self.heavy(weight, partial(self._batch, request, batch, leased=lease_s is not None))
        return answer if lease_s is not None else Delivery(answer, partial(self._settle, batch), END_BYTES)

    def _batch(self, request: Request, batch: Batch[G], *, leased: bool) -> Response:
        """The answer that holds `batch`. May block, and run in a thread."""
        groups = [msgspec.Raw(self.desk.json(group.payload)) for group in batch.groups]
        told = BatchAnswer(batch=groups)
        if leased:
            told = BatchAnswer(batch=groups, lease=str(batch.lease), batch_id=batch.batch_id)
        return answered(request, msgspec.json.encode(told))

    def _settle(self, batch: Batch[G], there: bool) -> bool:  # noqa: FBT001
        """Whether a client that acknowledges nothing is to have the end of its batch, which is its own then."""
        assert batch.lease is not None  # noqa: S101 (every batch is leased here)
        if not there:
            self.books.give_back(batch.lease)
            return False
        with suppress(UnknownLease):  # it took longer than SENDING_S, and went to the next who asked
            self._acknowledge(batch.lease)
            return True
        return False

    async def acknowledge(self, request: Request) -> dict[str, str]:
        """POST /acknowledge."""
        lease = (await self._decoded(request, Acknowledgement)).lease
        self._acknowledge(lease)
        return {"status": "success"}

    def _acknowledge(self, lease: int) -> None:
        batch = self.books.acknowledge(self._now(), lease)
        self.room.wake_all()
        self.desk.delivered(batch)


def _lease_s(asked: str | None) -> float | None:
    if asked is None:
        return None
    try:
        lease_s = float(asked)
    except ValueError:
        lease_s = 0.0
    if not 0 < lease_s <= LONGEST_LEASE_S:
        raise InvalidRecord(f"lease_s: expected seconds above 0, and at most {LONGEST_LEASE_S}, got {asked!r}")
    return lease_s
