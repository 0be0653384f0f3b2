"""What the gateway answers trainers: who registers, who asks for a batch, and who says that it has one.

Every batch is under a lease. Who asked for none is handed the end of its batch only when the lease is ended for it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from .....pipeline.waiting import Waiters
from .....schemas import InvalidRecord
from ..contract import BatchAnswer, Registered, TrainerRegistration
from ..queue.records import Batch, NoTrainer, UnknownLease
from ..queue.trajectory_queue import TrajectoryQueue
from .answers import END_BYTES, Delivery, answered
from .desk import Desk
from .reading import Reading

__all__ = ["TrainerEndpoints"]

G = TypeVar("G")

SENDING_S = 60.0
"""How long a batch may be under way to a trainer that acknowledges nothing; then it goes to the next who asks, and the
end of it to nobody else."""

LONGEST_LEASE_S = 86_400
"""A day. A trainer that died is not waited for any longer."""


class Acknowledgement(msgspec.Struct, frozen=True):
    """POST /acknowledge."""

    lease: int


class TrainerEndpoints(Generic[G]):
    """One method an endpoint."""

    def __init__(
        self, queue: TrajectoryQueue[G], desk: Desk[G], reading: Reading, room: Waiters, clock: Callable[[], float]
    ) -> None:
        self._queue = queue
        self._desk = desk
        self._reading = reading
        self._room = room
        self._now = clock

    async def register(self, request: Request) -> Registered:
        """POST /register."""
        registration = await self._reading.decoded(request, TrainerRegistration)
        uuid = self._queue.register_trainer(registration)
        self._desk.registered()
        self._room.wake_all()
        return Registered(uuid=uuid)

    async def batch(self, request: Request) -> Response | Delivery | BatchAnswer:
        """GET /batch; with `?lease_s=…` the batch has to be acknowledged within that time."""
        lease_s = _lease_s(request.query_params.get("lease_s"))
        if await request.is_disconnected():
            raise ClientDisconnect
        try:
            batch = self._queue.batch(self._now(), lease_s=lease_s or SENDING_S)
        except NoTrainer:
            told = "Trainer not registered. Call /register first."
            return BatchAnswer(status="error", message=told, batch=[])
        self._desk.asked(batch)
        if batch is None:
            return BatchAnswer(batch=None)
        self._room.wake_all()
        weight = sum(group.nbytes for group in batch.groups)
        answer = await self._reading.heavy(weight, partial(self._batch, request, batch, leased=lease_s is not None))
        return Delivery(answer, partial(self._settle, batch, leased=lease_s is not None), END_BYTES)

    def _batch(self, request: Request, batch: Batch[G], *, leased: bool) -> Response:
        """The answer that holds `batch`. May block, and run in a thread."""
        groups = [msgspec.Raw(self._desk.json(group.payload)) for group in batch.groups]
        told = BatchAnswer(batch=groups)
        if leased:
            told = BatchAnswer(batch=groups, lease=str(batch.lease), batch_id=batch.batch_id)
        return answered(request, msgspec.json.encode(told))

    def _settle(self, batch: Batch[G], there: bool, *, leased: bool) -> bool:  # noqa: FBT001
        """Whether a client is to have the end of its batch, which is its own then if it will acknowledge nothing."""
        assert batch.lease is not None  # noqa: S101 (every batch is leased here)
        if not there:
            self._queue.return_batch(batch.lease)
            return False
        if leased:
            return True
        with suppress(UnknownLease):  # it took longer than SENDING_S, and went to the next who asked
            self._acknowledge(batch.lease)
            return True
        return False

    async def acknowledge(self, request: Request) -> dict[str, str]:
        """POST /acknowledge."""
        lease = (await self._reading.decoded(request, Acknowledgement)).lease
        self._acknowledge(lease)
        return {"status": "success"}

    def _acknowledge(self, lease: int) -> None:
        batch = self._queue.acknowledge(self._now(), lease)
        self._room.wake_all()
        self._desk.delivered(batch)


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
