"""How a source keeps from sampling what will be too old when it is trained.

If an optimizer step trains p trajectories of this process, then the one that is begun while n are in flight is trained
about n / p steps later. So a group is begun only while n + group_size <= (max_lag + 1) · p; and always while n < p,
because a step that lacks trajectories would wait for ever. p is a mean, and batches that are packed by tokens want more
trajectories as completions get shorter: where nothing is being sampled and nothing has moved for the time of two
steps, the trainer is taken to be waiting, and one more group is begun. Where p is given it holds from the first step
on, and nothing gives way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from .._pipeline.ledger import Ledger
from .._pipeline.telemetry import get_logger

__all__ = ["LagLimiter"]

log = get_logger("penstock.pace")

PATIENCE_STEPS = 2.0
"""For how many steps' time nothing may move before the pace gives way."""

LEAST_PATIENCE_S = 1.0
"""Before any step was timed, and where steps are shorter."""


class LagLimiter:
    """Holds a source to its bound on lag. Without a bound, or before p is known, it holds nothing."""

    def __init__(self, ledger: Ledger, group_size: int, max_lag: int | None, *, per_step: int | None = None) -> None:
        self._ledger = ledger
        self._per_step = per_step
        """p, where it is given."""
        self._group_size = group_size
        self._max_lag = max_lag
        self._sampling = 0
        """Groups that are being sampled: while there are any, nobody waits in vain."""
        self._step = ledger.step
        self._step_began = anyio.current_time()
        self._step_s = 0.0
        """How long the last step took that was noticed."""

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """A group is being sampled within the body."""
        self._sampling += 1
        try:
            yield
        finally:
            self._sampling -= 1

    @property
    def limit(self) -> float | None:
        """A group may be begun while fewer trajectories than this are in flight; None where nothing is held back."""
        per_step = self._per_step or self._ledger.trained_per_step
        if self._max_lag is None or per_step is None:
            return None
        return max(per_step, (self._max_lag + 1) * per_step - self._group_size + 1, 1)

    @property
    def full(self) -> bool:
        """Whether another group has to wait."""
        return (limit := self.limit) is not None and self._ledger.in_flight >= limit

    async def wait_for_slot(self) -> None:
        """Wait until another group may be begun."""
        while (limit := self.limit) is not None and self._ledger.in_flight >= limit:
            if self._per_step is not None:
                await self._ledger.room(limit)
                continue
            before = self._moved()
            with anyio.move_on_after(self._stall_timeout_s) as patience:
                await self._ledger.room(limit)
            if patience.cancelled_caught and self._moved() == before and not self._sampling:
                log.debug("lag_limit_overridden", in_flight=self._ledger.in_flight, limit=limit, step=self._ledger.step)
                return

    def _moved(self) -> tuple[int, int, int]:
        """What changes when the trainer or a rollout does anything; times the optimizer's steps on the way."""
        step, now = self._ledger.step, anyio.current_time()
        if step > self._step:
            self._step_s = (now - self._step_began) / (step - self._step)
            self._step, self._step_began = step, now
        return step, self._ledger.in_flight, self._sampling

    @property
    def _stall_timeout_s(self) -> float:
        return max(LEAST_PATIENCE_S, PATIENCE_STEPS * self._step_s)
