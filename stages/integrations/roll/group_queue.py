"""`GroupQueue`: calls into ROLL's `GroupQueueManager`, a Ray actor, from the thread of one of its environments.

Read off ROLL's roll/distributed/scheduler/rollout_scheduler.py at COMMIT: `get_episode_id` :297, `put` :326 and :457,
`get_batch` :479. That actor's `put` has no result, so a group is put by a function that runs in the actor
(`__ray_call__`): ROLL's event loop runs it from its first line to its last without a switch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Literal, NamedTuple

from ...._pipeline.errors import MissingInterface

COMMIT = "8eb27cc2dc34c4d1310b169d9b86d339004d811a"
"""The commit of ROLL that the tests run."""

CALL_TIMEOUT_S = 120.0
"""Bound on a call that ROLL answers at once; its event loop also concatenates batches."""


class QueuePlace(NamedTuple):
    """A place for one group in ROLL's queue."""

    group_id: int
    """The number of its `GroupQueue`."""
    number: int
    """Its `episode_id`."""


class Put(NamedTuple):
    """The answer of ROLL's queue to a group."""

    answer: Literal["taken", "filtered", "older", "late"]
    """`older`: sampled with weights older than the episode, so ROLL could train it too late; the episode still waits.
    `late`: ROLL has dropped the episode."""
    created: int = 0
    """The step at which ROLL created the episode."""


class GroupQueue:
    """The queue of one group of environments."""

    def __init__(self, manager: Any, group_id: int, env_ids: Sequence[int]) -> None:
        """Make the queue of group `group_id`, with the environments `env_ids`; `manager` is the actor."""
        self._manager = manager
        self._group_id = group_id
        self._env_ids = tuple(env_ids)
        self._taken: Counter[int] = Counter()
        """Times that ROLL has given out an episode: once for each environment."""

    def next_episode(self) -> QueuePlace | None:
        """Wait until ROLL wants a group, and return its place; None when ROLL shuts down."""
        ray = import_module("ray")
        size = len(self._env_ids)
        while True:
            for number, times in self._taken.items():
                if times == size:
                    self._taken = Counter({later: n for later, n in self._taken.items() if later > number})
                    return QueuePlace(self._group_id, number)
            missing = size - max(self._taken.values(), default=0)
            asking = self._env_ids[size - missing :]
            numbers = ray.get([self._manager.get_episode_id.remote(self._group_id, env_id) for env_id in asking])
            if None in numbers:
                return None
            self._taken.update(numbers)

    def put(self, episode: QueuePlace, step: int, oldest: int, rollouts: Sequence[Any]) -> Put:
        """Put a group into the queue; ROLL gets the rollouts in the order of its environments.

        Args:
            episode: its place.
            step: ROLL's step.
            oldest: the oldest policy version in the group.
            rollouts: a `DataProto` for each environment.

        Raises:
            MissingInterface: ROLL's queue differs from that of the tests.
        """
        return Put(
            *_call(self._manager, put_group, episode, (step, oldest), list(zip(self._env_ids, rollouts, strict=True)))
        )


def held_episodes(manager: Any) -> set[QueuePlace]:
    """Return the episodes with rollouts in ROLL's queue, and not in a batch yet.

    Raises:
        MissingInterface: ROLL's queue differs from that of the tests.
    """
    return {QueuePlace(*each) for each in _call(manager, held_by)}


def _call(manager: Any, function: Any, *arguments: Any) -> Any:
    ray = import_module("ray")
    try:
        return ray.get(manager.__ray_call__.remote(function, *arguments), timeout=CALL_TIMEOUT_S)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, AttributeError):
            raise MissingInterface(
                f"expected the GroupQueueManager of ROLL at {COMMIT[:8]}, found one without what is used "
                f"({error.cause}): check out that commit"
            ) from error
        raise


# -- these run in ROLL's actor -----------------------------------------------------------------------------------------


def put_group(
    manager: Any, place: tuple[int, int], steps: tuple[int, int], rollouts: list[tuple[int, Any]]
) -> tuple[str, int]:
    """Put rollouts, each with its environment, into the queue of a group; return a `Put`.

    Args:
        manager: ROLL's actor.
        place: the group of environments, and its episode.
        steps: ROLL's step, and the oldest policy version.
        rollouts: of the group.
    """
    (group_id, number), (step, oldest) = place, steps
    queue = manager.group_queue[group_id]
    episode = queue.groups.get(number)
    if episode is None:
        return "late", 0
    if oldest < episode.create_step:
        return "older", episode.create_step
    filtered = queue.group_filter_count
    for env_id, rollout in rollouts:
        manager.put(group_id, number, step, rollout, env_id)
    return ("taken" if queue.group_filter_count == filtered else "filtered"), episode.create_step


def held_by(manager: Any) -> list[tuple[int, int]]:
    """Return (group, episode) of all that is in the queues, or was taken out for a batch that ROLL has not begun."""
    queued = [(group_id, number) for group_id, queue in manager.group_queue.items() for number in queue.groups]
    waiting = [get.result() for get in manager.pending_gets if get.done()]
    return queued + [(group.group_id, group.episode_id) for group in waiting]
