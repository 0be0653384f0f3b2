"""`TRLDeliveries`: the way of each sample through TRL, from its queue to the optimizer step that trained it.

TRL does not report what it trained. Its trainer takes samples from the queue one by one, drops those that are too old
or too long, collates the others into micro-batches, and trains these in their order, some time later: accelerate
collates one micro-batch ahead. So a micro-batch is noted when it is collated, and each `training_step` ends the
earliest.

Decides; does no I/O, and knows no TRL. The trainer's main thread alone uses it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ...._schemas import TrajectoryId
from ..flow_thread.flow_run import Drop


@dataclass(frozen=True, slots=True)
class SampleBounds:
    """The bounds by which TRL drops samples, of its configuration."""

    max_staleness: int
    token_budget: int = 0
    """Tokens of a row; 0 or less for no bound."""

    def drop(self, sample: Any, version: int) -> Drop | None:
        """Return why TRL, whose weights have `version`, drops `sample` when it takes it; None if it does not.

        In the order of its `RolloutQueueDataset` and its `TokenBudgetBatcher`.
        """
        if version - sample.model_version > self.max_staleness:
            return Drop("stale", f"dropped by TRL: older than max_staleness={self.max_staleness}")
        if 0 < self.token_budget < len(sample.input_ids):
            return Drop("rejected", f"dropped by TRL: longer than token_budget={self.token_budget}")
        return None


class TRLDeliveries:
    """The samples that TRL has taken and not trained yet."""

    def __init__(self) -> None:
        self._taken: dict[int, tuple[Any, TrajectoryId]] = {}
        """By the identity of its `input_ids`, which TRL passes on untouched; held, so that no other gets it."""
        self._collated: deque[list[TrajectoryId]] = deque()
        """Micro-batches that were collated and not trained, oldest first."""
        self._stepping: list[TrajectoryId] = []
        """Trained since the last optimizer step."""

    def __repr__(self) -> str:
        return f"<Deliveries: {len(self._taken)} taken, {len(self._collated)} micro-batches collated>"

    def take(self, sample: Any, trajectory: TrajectoryId) -> None:
        """Note a sample that TRL has taken and keeps."""
        self._taken[id(sample.input_ids)] = sample.input_ids, trajectory

    def collate(self, examples: Iterable[Any]) -> None:
        """Note the next micro-batch, by the `input_ids` of its examples."""
        self._collated.append([self._taken.pop(id(example))[1] for example in examples])

    def train(self) -> None:
        """Note that the earliest micro-batch was trained."""
        self._stepping += self._collated.popleft()

    def step(self) -> list[TrajectoryId]:
        """Return the trajectories of the optimizer step that is done."""
        stepped, self._stepping = self._stepping, []
        return stepped
