"""LagLimiter: limits how far a source samples ahead, so that trajectories are not too old when they are trained.

If an optimizer step trains p trajectories, then one that is begun while n are in flight is trained
about n / p steps later. So a group is begun only while n + group_size <= (max_lag + 1) · p; and always while n < p,
because otherwise a step that lacks trajectories would wait for ever. There are two cases:

1. p is known (`Schedule.per_step`): the limit is exact from the first step on. It is exceeded only where no group is
   being sampled and every stage waits for records: a stage that gathers groups lacks some that another has dropped.
   Where steps train fewer than stated, for a batch ships when its tokens are enough, p is their mean.
2. p is the mean of recent steps, and batches that are packed by tokens need more trajectories as completions get
   shorter: if no group is being sampled and no count has changed for the time of two steps, the trainer is assumed to
   wait, and one more group is begun.
"""

from __future__ import annotations

import anyio

from ..._pipeline.accounting.telemetry import get_logger
from ..._pipeline.graph.assignment import Samplers
from ..._pipeline.graph.context import Context

log = get_logger("penstock.pace")

STALL_STEPS = 2.0
"""Number of step times without any change until the limit is exceeded."""

FIRST_STALL_TIMEOUT_S = 10.0
"""Used before any step was timed: the first one may take long, for models are compiled in it."""

MIN_STALL_TIMEOUT_S = 1.0
"""Used where steps are shorter."""


class LagLimiter:
    """Limits the trajectories in flight by the bound on lag; without a bound, or before p is known, not at all."""

    def __init__(self, context: Context, group_size: int, samplers: Samplers) -> None:
        self._ledger = ledger = context.ledger
        self._all_wait = context.all_wait
        self._max_lag = context.schedule.max_lag
        self._stated = context.schedule.per_step
        """p, where it is known."""
        self._group_size = group_size
        self._samplers = samplers
        """Number of samplers; while they hold groups, the trainer is not assumed to wait."""
        self._step = ledger.step
        self._step_began = anyio.current_time()
        self._step_s = 0.0
        """Duration of the last observed step; 0 before any."""

    @property
    def limit(self) -> float | None:
        """Return the number of trajectories in flight that a new group must stay below; None for no limit."""
        per_step = self._ledger.pace.per_step
        if self._stated is not None and (per_step is None or per_step >= self._stated):
            per_step = -(-self._stated // self._group_size) * self._group_size  # in whole groups
        if self._max_lag is None or per_step is None:
            return None
        return max(per_step, (self._max_lag + 1) * per_step - self._group_size + 1, 1)

    @property
    def full(self) -> bool:
        """Return whether another group must wait."""
        return (limit := self.limit) is not None and self._ledger.in_flight >= limit

    async def wait_for_slot(self) -> None:
        """Wait until another group may be begun."""
        while (limit := self.limit) is not None and self._ledger.in_flight >= limit:
            before = self._counts()
            with anyio.move_on_after(self._stall_timeout_s) as timeout:
                await self._ledger.room(limit)
            if timeout.cancelled_caught and not before[2] and self._trainer_waits(before):
                log.debug("lag_limit_overridden", in_flight=self._ledger.in_flight, limit=limit, step=self._ledger.step)
                return

    def _trainer_waits(self, before: tuple[int, int, int]) -> bool:
        if self._stated is None:
            return self._counts() == before
        return not self._samplers.groups_held and self._all_wait()

    def _counts(self) -> tuple[int, int, int]:
        """Return counts that change with every action of the trainer or a rollout; measure the last step too."""
        step, now = self._ledger.step, anyio.current_time()
        if step > self._step:
            self._step_s = (now - self._step_began) / (step - self._step)
            self._step, self._step_began = step, now
        return step, self._ledger.in_flight, self._samplers.groups_held

    @property
    def _stall_timeout_s(self) -> float:
        return max(MIN_STALL_TIMEOUT_S, STALL_STEPS * self._step_s) if self._step_s else FIRST_STALL_TIMEOUT_S
