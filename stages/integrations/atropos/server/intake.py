"""Groups that come through shared memory enter the same queue as those that come over HTTP.

While the queue have no room for an environment its groups are kept where they lie, so that it gets no credit; those of
others pass it by.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

import anyio

from .....pipeline.telemetry import get_logger
from .....schemas import InvalidRecord, TrajectoryGroup
from ..queue.records import QueueFull, RequestRejected, Submission
from ..shm.shm_way_in import ShmWayIn

if TYPE_CHECKING:
    from .endpoints import Endpoints

__all__ = ["Intake"]

G = TypeVar("G")

LOOK_S = 1.0
"""How often those that wait are tried where no room was made: nobody tells that an environment fell silent."""

log = get_logger("penstock.atropos")


class Intake(Generic[G]):
    """Takes groups from `way_in` while `run` runs."""

    def __init__(self, way_in: ShmWayIn) -> None:
        self._way_in = way_in
        self._kept: dict[int | None, deque[tuple[TrajectoryGroup, Submission[G]]]] = {}
        """Those for which there was no room, by environment; the group keeps its sender from having credit."""

    @property
    def url(self) -> str:
        """What environments connect to."""
        return self._way_in.url

    def waiting(self, env_id: int) -> int:
        """Groups of an environment that have come and are not in the queue."""
        return self._way_in.waiting(env_id) + len(self._kept.get(env_id, ()))

    async def run(self, endpoints: Endpoints[G]) -> None:
        """Enter everything that comes into the queue of `endpoints`."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._try_again, endpoints)
            async for env_id, group in self._way_in:
                try:
                    submission = await endpoints.submission_of_group(group, env_id)
                except InvalidRecord as error:
                    _tell(env_id, error)
                    continue
                if env_id in self._kept or not _entered(submission, endpoints):
                    self._kept.setdefault(env_id, deque()).append((group, submission))
                del group, submission
            tasks.cancel_scope.cancel()

    async def _try_again(self, endpoints: Endpoints[G]) -> None:
        while True:
            with anyio.move_on_after(LOOK_S):
                await endpoints.room.wait()
            for env_id, line in list(self._kept.items()):
                while line and _entered(line[0][1], endpoints):
                    line.popleft()
                if not line:
                    del self._kept[env_id]


def _entered(submission: Submission[G], endpoints: Endpoints[G]) -> bool:
    """Whether there was room; what is refused for another reason is gone."""
    try:
        endpoints.accept([submission])
    except QueueFull:
        return False
    except RequestRejected as error:
        _tell(submission.env_id, error)
    return True


def _tell(env_id: int | None, error: Exception) -> None:
    log.warning("group_refused", env_id=env_id, reason=str(error))
