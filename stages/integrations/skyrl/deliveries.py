"""`SkyRLDeliveries`: the way of each trajectory through SkyRL, from the output of its generator to the optimizer step.

SkyRL names a trajectory by its prompt's `instance_id` and a `repetition_id`, and asks for the same ones again in a
later epoch. Both of its trainers make one batch of what a step trains, in `convert_to_training_input`.

Decides; knows no SkyRL. Its trainer's thread alone uses it, or one that this waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from ...._schemas import TrajectoryId

Key: TypeAlias = tuple[str, int]
"""SkyRL's `instance_id` and `repetition_id`."""


class Stepped(NamedTuple):
    """The ends of trajectories at an optimizer step."""

    trained: list[TrajectoryId]
    untrained: list[TrajectoryId]
    """In the batch, and no token of them trains."""


class SkyRLDeliveries:
    """The trajectories that SkyRL was given and has not trained yet."""

    def __init__(self) -> None:
        self._given: dict[Key, TrajectoryId] = {}
        self._trained: list[TrajectoryId] = []
        """In the batch that is being trained."""
        self._untrained: list[TrajectoryId] = []

    def __repr__(self) -> str:
        return f"<Deliveries: {len(self._given)} given, {len(self._trained)} in the batch>"

    def give(self, key: Key, trajectory: TrajectoryId) -> TrajectoryId | None:
        """Note that SkyRL was given a trajectory; return the earlier one of that name, which it will not train."""
        earlier = self._given.get(key)
        self._given[key] = trajectory
        return earlier

    def batch(self, keys: Iterable[Key], trains: Iterable[bool]) -> None:
        """Note the rows of the batch that is trained next, and in which of them a token trains.

        A row may be there twice: SkyRL's dynamic sampling repeats good ones. One that was given up is unknown.
        """
        for key, trained in zip(keys, trains, strict=True):
            if (trajectory := self._given.pop(key, None)) is not None:
                (self._trained if trained else self._untrained).append(trajectory)

    def drop(self, keys: Iterable[Key]) -> list[TrajectoryId]:
        """Return the trajectories of these rows, which SkyRL will not train."""
        return [dropped for key in keys if (dropped := self._given.pop(key, None)) is not None]

    def drop_rest(self) -> list[TrajectoryId]:
        """Return all that were given and are in no batch."""
        return self.drop(list(self._given))

    def step(self) -> Stepped:
        """Return the ends of the batch whose optimizer step is done."""
        stepped = Stepped(self._trained, self._untrained)
        self._trained, self._untrained = [], []
        return stepped


def keys_of(trajectory_ids: Sequence[object]) -> list[Key]:
    """Return the names of SkyRL's `TrajectoryID`s."""
    return [(str(each.instance_id), int(each.repetition_id)) for each in trajectory_ids]  # type: ignore[attr-defined]
