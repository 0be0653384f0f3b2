"""`Deliveries`: the trajectories that a foreign trainer was given, until it has trained or dropped them.

    give(key) ──▶ batch(keys) ──▶ train() ──▶ step() ──▶ stepped(): to be committed
            └───▶ drop(keys): to be ended

Such a trainer does not report its training. An integration follows samples, batches and drops by a key that passes
through it: the identity of an array, the names of a row, a place in a queue.

Decides; does no I/O, and knows no trainer. The caller excludes threads from each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from ...._schemas import TrajectoryId
from .sample_queue import Trajectories

Key = TypeVar("Key", bound=Hashable)
Note = TypeVar("Note")


class Delivery(NamedTuple, Generic[Note]):
    """The trajectories that the trainer was given under one key."""

    trajectories: Trajectories
    note: Note
    """A value that the integration keeps with them."""


@dataclass(slots=True)
class _Batch(Generic[Key]):
    trajectories: dict[Key, Trajectories]
    parts: int
    """Parts that the trainer still trains."""


class Deliveries(Generic[Key, Note]):
    """The trajectories that a trainer was given and that were not committed yet."""

    def __init__(self) -> None:
        self.given: dict[Key, Delivery[Note]] = {}
        """Those in no batch, in the order of `give`."""
        self._batches: deque[_Batch[Key]] = deque()
        """Oldest first."""
        self._trained: list[TrajectoryId] = []
        """Since the last optimizer step."""
        self._stepped: list[TrajectoryId] = []

    def __repr__(self) -> str:
        return f"<Deliveries: {len(self.given)} given, {len(self._batches)} batches>"

    def give(self, key: Key, trajectories: Trajectories, note: Note) -> Trajectories:
        """Note trajectories given to the trainer; return those given under that key before: it will not train them."""
        earlier = self.given.pop(key, None)
        self.given[key] = Delivery(trajectories, note)
        return () if earlier is None else earlier.trajectories

    def batch(self, keys: Iterable[Key], parts: int = 1) -> None:
        """Note that the trainer trains these next, in `parts` parts. A key that is repeated, or unknown, is ignored."""
        self._batches.append(
            _Batch({key: self.given.pop(key).trajectories for key in keys if key in self.given}, parts)
        )

    def is_batched(self, keys: Collection[Key]) -> bool:
        """Return whether one of `keys` is in a batch that is not trained yet."""
        return any(key in batch.trajectories for batch in self._batches for key in keys)

    def train(self) -> None:
        """Note that a part of the oldest batch was trained."""
        batch = self._batches[0]
        batch.parts -= 1
        if not batch.parts:
            self._trained += [each for given in self._batches.popleft().trajectories.values() for each in given]

    def step(self) -> None:
        """Note that the optimizer step of all trained trajectories is done."""
        self._stepped += self._trained
        self._trained = []

    def step_all(self) -> None:
        """Note that all batches were trained, and that their optimizer step is done."""
        while self._batches:
            self.train()
        self.step()

    def stepped(self) -> list[TrajectoryId]:
        """Return, once, the trajectories of optimizer steps that are done."""
        stepped, self._stepped = self._stepped, []
        return stepped

    def drop(self, keys: Iterable[Key]) -> Trajectories:
        """Return the trajectories of these keys: in no batch, and not to be trained."""
        return tuple(each for key in keys if key in self.given for each in self.given.pop(key).trajectories)
