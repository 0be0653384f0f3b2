"""`Episodes`: the groups that ROLL's queue has taken, from `put` to the optimizer step that trained them.

ROLL does not report what it trained. Its pipeline asks for the batch of step N, trains it, and only then names step
N + 1. Nothing leaves its queue between two steps but by two ways: into the batch, or, if the group is too old, dropped
(roll/distributed/scheduler/rollout_scheduler.py:264-285, 525-529). Which of them it was follows from the step at which
ROLL created the group.

Decides; does no I/O, and knows no ROLL.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from ...._schemas import TrajectoryId


class QueuePlace(NamedTuple):
    """A place for one group in ROLL's queue."""

    group_id: int
    """The number of its `GroupQueue`."""
    number: int
    """Its `episode_id`."""


class _Queued(NamedTuple):
    trajectories: tuple[TrajectoryId, ...]
    created: int


class LeftPlaces(NamedTuple):
    """Episodes that have left ROLL's queue since the last step."""

    trained: list[TrajectoryId]
    dropped: list[TrajectoryId]


class Episodes:
    """The groups in ROLL's queue."""

    def __init__(self, async_generation_ratio: int) -> None:
        """Begin with none; `async_generation_ratio` is ROLL's bound on the age of a group, in steps."""
        self._ratio = async_generation_ratio
        self._queued: dict[QueuePlace, _Queued] = {}
        self._step: int | None = None
        """The step whose batch ROLL trains, or has trained last."""

    def __repr__(self) -> str:
        return f"<Episodes: {len(self._queued)} queued, step {self._step}>"

    def put(self, episode: QueuePlace, trajectories: tuple[TrajectoryId, ...], created: int) -> None:
        """Note a group that the queue has taken, for an episode that ROLL created at step `created`."""
        self._queued[episode] = _Queued(trajectories, created)

    def advance(self, step: int, held: Collection[QueuePlace]) -> LeftPlaces:
        """Return what has left the queue, which holds `held`, now that ROLL begins `step`; the last one is trained."""
        held = set(held)
        gone = [self._queued.pop(episode) for episode in list(self._queued) if episode not in held]
        trained, dropped = LeftPlaces([], [])
        for queued in gone:
            assert self._step is not None  # noqa: S101 (ROLL takes nothing before its first step)
            ended = dropped if self._step - queued.created > self._ratio else trained
            ended.extend(queued.trajectories)
        self._step = step
        return LeftPlaces(trained, dropped)
