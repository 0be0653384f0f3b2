"""`VerlRequests`: the prompts that verl has asked for, and the way of each one's group to an optimizer step.

verl asks for groups by the ids of prompts, and afterwards only removes keys from TransferQueue: `{uid}` of a prompt
and `{uid}_{session}_{index}` of a trajectory (trainer/ppo/v1/replay_buffer.py of verl 0.9.1). The keys that it removes
together tell its action:

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
from ..flow_thread.deliveries import Deliveries
from ..flow_thread.flow_run import Drop
from ..flow_thread.sample_queue import Trajectories


class Age(NamedTuple):
    """The values of a group that verl's bounds apply to."""

    step: int
    """The step that the prompt's tag has."""
    values: list[float]
    """The metric of each trajectory."""


@dataclass(frozen=True, slots=True)
class GroupBounds:
    """verl's bounds on groups, of its configuration: it drops others."""

    max_off_policy_threshold: int | None = None
    """None if verl keeps stale groups: its synchronous trainer, or the strategy `wait`."""
    filter_metric: str | None = None
    """The metric that must differ within a group: others are dropped. None if all are kept."""

    def reason(self, step: int, age: Age) -> Drop:
        """Return why verl, now at `step`, dropped a group, by the rules of `_terminal_eviction_reasons`."""
        if self.max_off_policy_threshold is not None and step - age.step + 1 > self.max_off_policy_threshold:
            threshold = f"trainer.v1.sampler.max_off_policy_threshold={self.max_off_policy_threshold}"
            return Drop("stale", f"dropped by verl: older than {threshold}")
        if self.filter_metric is not None and len(age.values) > 1 and float(np.std(age.values)) == 0.0:
            return Drop("filtered", f"dropped by verl: no difference in {self.filter_metric}")
        return Drop("filtered", "dropped by verl: more groups than it trains")


class Cleared(NamedTuple):
    """Ends of groups after verl removed their keys."""

    trained: list[TrajectoryId]
    dropped: list[tuple[Trajectories, Drop]]


@dataclass(slots=True)
class VerlRequests:
    """The prompts that verl has asked for and not trained yet."""

    limits: GroupBounds
    step: int = 0
    """The step of verl that asked last."""
    _waiting: deque[tuple[str, int]] = field(default_factory=deque)
    """Prompts without a group, first asked first, each with the step that asked."""
    _deliveries: Deliveries[str, Age] = field(default_factory=Deliveries)
    """The groups, by the `uid` of their prompt; a batch has those that verl has selected together."""

    def __repr__(self) -> str:
        return f"<Requests of step {self.step}: {len(self._waiting)} without a group, {self._deliveries!r}>"

    def ask(self, uids: Iterable[str], step: int) -> None:
        """Note prompts of `step`."""
        self.step = step
        self._waiting.extend((uid, step) for uid in uids)

    def next(self) -> tuple[str, int] | None:
        """Return the prompt that has waited longest, and its step; None without one."""
        return self._waiting[0] if self._waiting else None

    def answer(self, trajectories: Trajectories, step: int, values: list[float]) -> None:
        """Note that this group, with `step` in its tag, answers the prompt that has waited longest."""
        uid, _ = self._waiting.popleft()
        self._deliveries.give(uid, trajectories, Age(step, values))

    def fail(self) -> list[str]:
        """Return all prompts without a group: they will get none."""
        uids = [uid for uid, _ in self._waiting]
        self._waiting.clear()
        return uids

    def clear(self, keys: Iterable[str]) -> Cleared:
        """Note keys that verl has removed; return the ends of the groups that they belong to."""
        prompts: set[str] = set()
        trajectories: set[str] = set()
        for key in keys:
            uid, is_trajectory, _ = key.partition("_")
            (trajectories if is_trajectory else prompts).add(uid)
        if self._deliveries.is_batched(trajectories):
            self._deliveries.step_all()
        given = self._deliveries.given
        dropped = [uid for uid in given if uid in trajectories]
        reasons = [self.limits.reason(self.step, given[uid].note) for uid in dropped]
        ends = [(self._deliveries.drop([uid]), reason) for uid, reason in zip(dropped, reasons, strict=True)]
        self._deliveries.batch([uid for uid in given if uid in prompts])
        return Cleared(self._deliveries.stepped(), ends)

    def train(self) -> list[TrajectoryId]:
        """Return the trajectories of all selected groups: their step is done, and their keys may be removed later."""
        self._deliveries.step_all()
        return self._deliveries.stepped()

    def lying(self) -> list[TrajectoryId]:
        """Return the trajectories of all groups that lie in TransferQueue and were not selected."""
        return [each for group in self._deliveries.given.values() for each in group.trajectories]
