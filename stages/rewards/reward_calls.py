"""The calls of one component in one running stage: with bounded concurrency, timed, accounted.

An async function runs on the event loop, any other in a thread. A sync function that exceeds its timeout cannot be
stopped: it is abandoned and keeps its thread, so that one that hangs repeatedly makes all calls time out instead of
taking more and more threads. Every failure is accounted: see `RewardComponent.on_failure`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, TypeAlias

import anyio
import numpy as np

from ..._pipeline.accounting.progress_guard import FAILURE_LIMIT
from ..._pipeline.accounting.telemetry import get_logger
from ..._pipeline.errors import MissingColumn, RewardFunctionFailed
from ..._pipeline.graph.context import current
from ..._pipeline.util.repeated_errors import RepeatedErrors
from ..._pipeline.util.user_code import await_user, raised_text
from ..contracts.threads import Threads
from .returned_values import listed
from .reward_functions import RewardComponent
from .reward_input import RewardInput

log = get_logger("penstock.reward")

Outcome: TypeAlias = "float | RewardFailure | None"
"""The contribution to the reward; None if the function does not apply."""


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """The reason that a trajectory has no value and is to be dropped."""

    reason: str


class Calls:
    """The calls of one component in one running stage."""

    def __init__(self, component: RewardComponent, function: Callable[..., Any]) -> None:
        self._component = component
        self._function = function
        self._permits = anyio.Semaphore(component.concurrency)
        """A call that waits here has not begun, so its timeout does not run."""
        self._threads = Threads(component.concurrency)
        self._errors = RepeatedErrors(log, "reward_function_failed")
        self._failed_in_a_row = 0

    async def values(self, inputs: Sequence[RewardInput]) -> list[Outcome]:
        """Return the contribution to the reward of each completion of a group, or the result of its failure.

        Raises:
            RewardFunctionFailed: the function has failed too many times in a row.
            MissingColumn: the data lacks a column that the function takes.
            Exception: raised by the function, if `on_failure` is "raise".
        """
        values: list[Outcome] = [None] * len(inputs)

        async def judge(places: range) -> None:
            for place, value in zip(places, await self._judged([inputs[s] for s in places]), strict=True):
                values[place] = value

        size = len(inputs) if self._component.batched else 1
        async with anyio.create_task_group() as tasks:
            for first in range(0, len(inputs), max(size, 1)):
                tasks.start_soon(await_user, judge, range(first, first + size))
        return values

    async def tried(self, inputs: Sequence[RewardInput]) -> None:
        """Call the function with all of `inputs`, outside a run.

        Raises:
            TimeoutError: a call takes too long.
            TypeError, ValueError: a verdict is no value.
            Exception: raised by the function.
        """
        for judged in [inputs] if self._component.batched else [[each] for each in inputs]:
            for verdict in await self._called(judged):
                _value(verdict)

    def close(self) -> None:
        """End the threads, each after its current call."""
        self._threads.close()

    # -- one call ------------------------------------------------------------------------------------------------------

    async def _judged(self, inputs: Sequence[RewardInput]) -> list[Outcome]:
        """Return the contributions of completions that are judged in one call."""
        try:
            async with self._permits:
                verdicts = await self._called(inputs)
        except MissingColumn:  # of every row, most likely: no failure of one trajectory
            raise
        except Exception as error:  # noqa: BLE001 (any exception of a user's function is the failure of what it judged)
            return [self._failed(error, each) for each in inputs]
        return [self._contribution(verdict, each) for verdict, each in zip(verdicts, inputs, strict=True)]

    async def _called(self, inputs: Sequence[RewardInput]) -> list[Any]:
        component, function = self._component, self._function
        argument = inputs if component.batched else inputs[0]
        with anyio.move_on_after(component.reward_timeout_s):
            returned = await self._threads.call(partial(function, argument))
            return _values_of_group(returned, len(inputs)) if component.batched else [returned]
        raise TimeoutError(f"{component.name}: expected a value within {component.reward_timeout_s} s, got none")

    # -- its values ----------------------------------------------------------------------------------------------------

    def _contribution(self, verdict: Any, judged: RewardInput) -> Outcome:
        """Return the contribution to the reward of a verdict; observe it."""
        try:
            value = _value(verdict)
        except (TypeError, ValueError) as error:
            return self._failed(error, judged)
        self._failed_in_a_row = 0
        if isinstance(verdict, Mapping):
            self._observe_others(verdict)
        return None if value is None else self._weighted(value)

    def _weighted(self, value: float) -> float:
        current().metrics.mean(f"rewards/{self._component.name}/mean", value)
        return self._component.weight * value

    def _observe_others(self, verdict: Mapping[str, Any]) -> None:
        """Observe the numbers of `verdict` besides its score."""
        for key, value in verdict.items():
            if key != "score" and isinstance(value, Real | np.bool_) and math.isfinite(value):
                current().metrics.mean(f"rewards/{self._component.name}/{key}", float(value))

    # -- its failures --------------------------------------------------------------------------------------------------

    def _failed(self, error: Exception, judged: RewardInput) -> float | RewardFailure:
        """Return the result of a failure, after counting it.

        Raises:
            Exception: `error`, if `on_failure` is "raise".
        """
        rule = self._component
        if rule.on_failure == "raise":
            raise error
        self._count_failure(error, judged)
        if isinstance(rule.on_failure, str):
            kind, _, message = raised_text(error).partition(": ")
            return RewardFailure(f"{rule.name}: {kind}: {message.removeprefix(f'{rule.name}: ')}".rstrip(": "))
        return self._weighted(float(rule.on_failure))

    def _count_failure(self, error: Exception, judged: RewardInput) -> None:
        """Log and count a failure.

        Raises:
            RewardFunctionFailed: it is the last of too many in a row.
        """
        name = self._component.name
        self._errors.record(error, function=name, trajectory=judged.trajectory.id, error=raised_text(error))
        current().metrics.total(f"rewards/{name}/failed")
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= FAILURE_LIMIT:
            raise RewardFunctionFailed(
                f"expected {name} to return a number for at least one of {FAILURE_LIMIT} completions in a row, got a "
                f"failure for each, the last one {raised_text(error)}. Fix the function; the first "
                f"traceback of each error is in the log"
            ) from error


def _values_of_group(returned: Any, count: int) -> list[Any]:
    """Return the values of all completions of a group.

    Raises:
        TypeError: it has no values in an order.
        ValueError: it has another length.
    """
    values = listed(returned)
    if len(values) != count:
        raise ValueError(f"expected {count} values, one for each completion, got {len(values)}")
    return values


def _value(verdict: Any) -> float | None:
    """Return the value of a verdict; None if the function does not apply.

    Raises:
        TypeError, ValueError: it is no finite number.
    """
    score = verdict["score"] if isinstance(verdict, Mapping) and "score" in verdict else verdict
    if score is None:
        return None
    if isinstance(score, Mapping):
        raise TypeError(f'expected a number or a mapping with a "score", got one with {sorted(map(str, score))}')
    number = float(score)
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number, got {number}")
    return number
