"""`Arrivals`: groups that are sampled without being asked for, as answers to SkyRL's requests.

A flow with a source of its own, an `AtroposGateway` for one, sends groups of prompts that it chooses. Each request of
SkyRL is answered by the next group that arrives, its repetitions by the rows of that group. While no request waits, the
next group stays where it is, and the flow behind it: the channels and the source bound the groups kept.

Belongs to the event loop of the flow, and knows no SkyRL.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from ...._pipeline.accounting.progress_guard import FAILURE_LIMIT
from ...._pipeline.accounting.telemetry import get_logger
from ...._pipeline.errors import RolloutsFailed
from ...._schemas import TrajectoryGroup
from ...advantages.zero_advantages import zero_advantages
from ..flow_thread.flow_run import Decode, Drop
from ..flow_thread.sample_queue import Trajectories
from ..flow_thread.sampling import branches, other_temperature
from .requests import PromptRequest, fail, give
from .samples import Rules

log = get_logger("penstock.skyrl")

UNREAD = {
    "advantages": "advantages of its own, and SkyRL computes them",
    "teacher_ids": "candidates of a teacher, and SkyRL's loss reads none",
}
"""Columns that would change the training, without a place in SkyRL."""


class Arrivals:
    """The requests of SkyRL, answered by groups in the order of arrival; see `PenstockGenerator`."""

    def __init__(self, group_size: int, temperature: float, rules: Rules) -> None:
        """Prepare.

        Args:
            group_size: rows of a group: `generator.n_samples_per_prompt`.
            temperature: that of SkyRL's log-probabilities.
            rules: of SkyRL's configuration.
        """
        self._group_size = group_size
        self._temperature = temperature
        self._rules = rules
        self._waiting: deque[PromptRequest] = deque()
        self._refused = 0
        """Trajectories in a row."""

    def __repr__(self) -> str:
        return f"<Arrivals: {len(self._waiting)} not answered>"

    # -- SkyRL's side, called on the event loop of the flow ------------------------------------------------------------

    def ask(self, requests: Iterable[PromptRequest]) -> None:
        """Have the next groups answer these."""
        self._waiting.extend(requests)

    # -- the flow's end, called by `FlowRun` ---------------------------------------------------------------------------

    def awaited(self, group: TrajectoryGroup, decode: Decode | None) -> Iterator[tuple[Trajectories, Any]]:
        """Yield a copy of `group`, or the reason that it cannot be trained, with the ids of its rows.

        Raises:
            RolloutsFailed: so many in a row were refused that the flow and SkyRL's configuration cannot fit.
        """
        del decode
        if (reason := self._refusal(group)) is not None:
            log.warning("group_refused", env=group.env, instance_id=group.instance_id, reason=reason)
            self._count_refused(group, reason)
            yield tuple(group.ids), Drop("rejected", reason)
        else:
            self._refused = 0
            yield tuple(group.ids), zero_advantages(group).owned()

    def _refusal(self, group: TrajectoryGroup) -> str | None:
        if group.rollouts != self._group_size:
            return f"a group of {group.rollouts}: expected generator.n_samples_per_prompt={self._group_size}"
        if (branched := branches(group)) is not None:
            return f"{branched}: SkyRL's rollouts have one each"
        for column, what in UNREAD.items():
            if getattr(group, column) is not None:
                return f"a group with {what}"
        if self._rules.logprobs and group.behavior_logprobs is None:
            return "a group without log-probabilities: expected them, or generator.sampling_params.logprobs=null"
        if (found := other_temperature(group, self._temperature)) is not None:
            return (
                f"a group at temperature {found}: expected generator.sampling_params.temperature={self._temperature:g}"
            )
        return None

    def _count_refused(self, group: TrajectoryGroup, reason: str) -> None:
        self._refused += len(group)
        if self._refused >= FAILURE_LIMIT:
            raise RolloutsFailed(
                f"SkyRL: expected groups that can be trained, got {self._refused} trajectories in a row that were "
                f"refused, the last ones from {group.env} as {reason}"
            )

    def offer(self, group: TrajectoryGroup, trajectories: Trajectories) -> bool:
        """Answer the request that has waited longest; return False while none waits."""
        del trajectories
        while self._waiting:
            if not (request := self._waiting.popleft()).answered.cancelled():
                give(request, dict(zip(request.repetitions, range(len(group)), strict=True)), group)
                return True
        return False

    def close(self, error: BaseException) -> None:
        """Fail everything that is not answered."""
        while self._waiting:
            fail(self._waiting.popleft(), error)
