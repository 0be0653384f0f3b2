"""`VerlRequests`: the prompts that verl has asked for, and the way of each one's group to an optimizer step.

verl asks for groups by the ids of prompts, and afterwards only removes keys from TransferQueue: `{uid}` of a prompt
and `{uid}_{session}_{index}` of a trajectory (trainer/ppo/v1/replay_buffer.py of verl 0.9.1). Which keys it removes
together says what it did:

    the prompt alone                   selected for a batch           `_materialize_batch`, line 397
    the prompt with its trajectories   dropped                        `_clear_groups`, line 247
    trajectories of a selected prompt  trained: the step is done      `PPOTrainer.fit`, trainer_base.py:511

Decides; does no I/O, and knows no verl. The caller excludes threads from each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ...._schemas import TrajectoryId
from ..flow_thread.flow_run import Drop


@dataclass(frozen=True, slots=True)
class GroupBounds:
    """The bounds by which verl drops groups, of its configuration."""

    max_off_policy_threshold: int | None = None
    """None where verl drops none as stale: its synchronous trainer, or the strategy `wait`."""
    filter_metric: str | None = None
    """The metric whose groups without a difference are dropped; None where all are kept."""

    def reason(self, step: int, group_step: int, values: list[float]) -> Drop:
        """Return why verl dropped a group at `step`, by the rules of `_terminal_eviction_reasons`.

        Args:
            step: verl's step now.
            group_step: the step that the prompt's tag has.
            values: the metric of each trajectory.
        """
        if self.max_off_policy_threshold is not None and step - group_step + 1 > self.max_off_policy_threshold:
            threshold = f"trainer.v1.sampler.max_off_policy_threshold={self.max_off_policy_threshold}"
            return Drop("stale", f"dropped by verl: older than {threshold}")
        if self.filter_metric is not None and len(values) > 1 and float(np.std(values)) == 0.0:
            return Drop("filtered", f"dropped by verl: no difference in {self.filter_metric}")
        return Drop("filtered", "dropped by verl: more groups than it trains")


@dataclass(slots=True)
class _Group:
    """A group that lies in TransferQueue, or is being trained."""

    trajectories: list[TrajectoryId]
    step: int
    values: list[float]
    selected: bool = False


class Cleared(NamedTuple):
    """Ends of groups whose keys verl removed."""

    trained: list[TrajectoryId]
    dropped: list[tuple[list[TrajectoryId], Drop]]


@dataclass(slots=True)
class VerlRequests:
    """The prompts that verl has asked for and not trained yet."""

    limits: GroupBounds
    step: int = 0
    """The step of verl that asked last."""
    _waiting: deque[tuple[str, int]] = field(default_factory=deque)
    """Prompts without a group, first asked first, each with the step that asked."""
    _groups: dict[str, _Group] = field(default_factory=dict)

    def __repr__(self) -> str:
        selected = sum(group.selected for group in self._groups.values())
        lie = len(self._groups) - selected
        return f"<Requests of step {self.step}: {len(self._waiting)} without a group, {lie} with, {selected} selected>"

    def ask(self, uids: Iterable[str], step: int) -> None:
        """Note prompts of `step`."""
        self.step = step
        self._waiting.extend((uid, step) for uid in uids)

    def next(self) -> tuple[str, int] | None:
        """Return the prompt that has waited longest, and its step; None if none waits."""
        return self._waiting[0] if self._waiting else None

    def answer(self, trajectories: list[TrajectoryId], step: int, values: list[float]) -> None:
        """Note that this group, whose tag has `step`, answers the prompt that has waited longest."""
        uid, _ = self._waiting.popleft()
        self._groups[uid] = _Group(trajectories, step, values)

    def fail(self) -> list[str]:
        """Return all prompts without a group, which get none."""
        uids = [uid for uid, _ in self._waiting]
        self._waiting.clear()
        return uids

    def clear(self, keys: Iterable[str]) -> Cleared:
        """Note keys that verl has removed; return what it did with the groups that they belong to."""
        cleared = Cleared([], [])
        prompts: set[str] = set()
        trajectories: set[str] = set()
        for key in keys:
            uid, is_trajectory, _ = key.partition("_")
            (trajectories if is_trajectory else prompts).add(uid)
        for uid in [uid for uid in self._groups if uid in prompts or uid in trajectories]:
            group = self._groups[uid]
            if uid not in trajectories:
                group.selected = True
                continue
            del self._groups[uid]
            if group.selected:
                cleared.trained.extend(group.trajectories)
            else:
                drop = self.limits.reason(self.step, group.step, group.values)
                cleared.dropped.append((group.trajectories, drop))
        return cleared

    def train(self) -> list[TrajectoryId]:
        """Return the trajectories of all selected groups, whose step is done; their keys may be removed later."""
        selected = [uid for uid, group in self._groups.items() if group.selected]
        return [each for uid in selected for each in self._groups.pop(uid).trajectories]

    def lying(self) -> list[TrajectoryId]:
        """Return the trajectories of all groups that lie in TransferQueue and were not selected."""
        return [each for group in self._groups.values() if not group.selected for each in group.trajectories]
