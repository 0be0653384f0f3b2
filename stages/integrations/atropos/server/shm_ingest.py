"""Groups that come through shared memory enter the same queue as those that come over HTTP.

While the queue has no room for an environment its groups stay in their slots, so that it gets no credit; groups of
other environments pass them.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

import anyio

from .....schemas import TrajectoryGroup
from ..contract import Untrainable
from ..queue.records import QueueFull, RequestRejected, Submission
from ..shm.receiver import ShmReceiver

if TYPE_CHECKING:
    from .endpoints import Endpoints

__all__ = ["ShmIngest"]

G = TypeVar("G")

RETRY_S = 1.0
"""Interval in which groups are tried again though nothing made room: nobody tells that an environment fell silent."""


class ShmIngest(Generic[G]):
    """Takes groups from `receiver` while `run` runs."""

    def __init__(self, receiver: ShmReceiver) -> None:
        self._receiver = receiver
        self._kept: dict[int | None, deque[tuple[TrajectoryGroup, Submission[G]]]] = {}
        """Groups without room, by environment; holding a group keeps its sender from having credit."""

    @property
    def url(self) -> str:
        """Address that environments connect to."""
        return self._receiver.url

    def waiting(self, env_id: int) -> int:
        """Return the number of groups of an environment that have come and are not in the queue."""
        return self._receiver.waiting(env_id) + len(self._kept.get(env_id, ()))

    async def run(self, endpoints: Endpoints[G]) -> None:
        """Enter everything that comes into the queue of `endpoints`."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._retry, endpoints)
            async for env_id, group in self._receiver:
                try:
                    submission = await endpoints.submission_of_group(group, env_id)
                except (Untrainable, RequestRejected) as error:
                    endpoints.refuse(env_id, error)
                    continue
                if env_id in self._kept or not _entered(submission, endpoints):
                    self._kept.setdefault(env_id, deque()).append((group, submission))
                del group, submission
            tasks.cancel_scope.cancel()

    async def _retry(self, endpoints: Endpoints[G]) -> None:
        while True:
            with anyio.move_on_after(RETRY_S):
                await endpoints.room.wait()
            for env_id, line in list(self._kept.items()):
                while line and _entered(line[0][1], endpoints):
                    line.popleft()
                if not line:
                    del self._kept[env_id]


def _entered(submission: Submission[G], endpoints: Endpoints[G]) -> bool:
    """Return whether there was room; a group that is refused for another reason is dropped and counted."""
    try:
        endpoints.accept([submission])
    except QueueFull:
        return False
    except RequestRejected as error:
        endpoints.refuse(submission.env_id, error)
    return True
