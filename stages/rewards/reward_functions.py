"""Python functions as components of a reward: sync or async, with bounded concurrency and a timeout for each call.

An async function runs on the event loop, any other in a thread. A sync function that exceeds its timeout cannot be
stopped: it is abandoned and keeps its thread, so that one that hangs repeatedly makes all calls time out instead of
taking more and more threads. Every failure is accounted: see `RewardFunction.on_failure`.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import anyio
import msgspec

from ..._pipeline.accounting.failure_streak import FAILURE_LIMIT
from ..._pipeline.accounting.telemetry import get_logger
from ..._pipeline.errors import RewardFunctionFailed
from ..._pipeline.graph.context import current
from ..._pipeline.util.repeated_errors import RepeatedErrors
from ..._schemas import Trajectory
from ..._schemas.numbers import normalize_counts, normalize_numbers
from ..threads import Threads

log = get_logger("penstock.reward")


class RewardInput(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The argument of a reward function."""

    trajectory: Trajectory
    """The tokens, with all other columns of the trajectory."""
    score: float
    """The raw score, from the environment."""
    text: str
    """The text of the completion, with a line break between turns; empty if the function does not read text."""
    meta: dict[str, Any]
    """The `meta` of the group, for example the question."""


Judge: TypeAlias = Callable[[RewardInput], float | Awaitable[float]]


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A Python function as one component of the reward.

    >>> RewardFunction(lambda completion: 0.1 * completion.text.count("because"), name="reasons").name
    'reasons'

    Args:
        function: takes a `RewardInput`, returns a finite number.
        name: of the component; the function's own by default.
        concurrency: bound on concurrent calls.
        reward_timeout_s: bound on the time of one call.
        on_failure: the rule for a trajectory for which the function raises, times out or returns no finite number.
            "drop": it ends as failed, with the function's name and the error as reason; the rest of its group goes on.
            "raise": the pipeline fails. A number: that is the component's value, and the failure is counted.
        reads_text: whether the function reads `RewardInput.text`; if no component does, no token is decoded.

    Raises:
        ValueError: a number out of range, or a function without a name.
    """

    function: Judge
    name: str = ""
    concurrency: int = 16
    reward_timeout_s: float = 30.0
    on_failure: Literal["drop", "raise"] | float = "drop"
    reads_text: bool = True

    def __post_init__(self) -> None:
        name = self.name or getattr(self.function, "__name__", "")
        if not name or name == "<lambda>":
            raise ValueError(f"name: expected one, {self.function!r} has none of its own")
        object.__setattr__(self, "name", name)
        normalize_counts(self, "concurrency")
        normalize_numbers(self, "reward_timeout_s")
        if isinstance(self.on_failure, str):
            known = self.on_failure in {"drop", "raise"}
        else:
            known = math.isfinite(self.on_failure)
        if not known:
            raise ValueError(f"on_failure: expected 'drop', 'raise' or a finite number, got {self.on_failure!r}")


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """The reason for which a trajectory has no value and is to be dropped."""

    reason: str


class Calls:
    """The calls of one function in one running stage: bounded, timed, accounted."""

    def __init__(self, rule: RewardFunction) -> None:
        self._rule = rule
        self._permits = anyio.Semaphore(rule.concurrency)
        """A call that waits here has not begun, so its timeout does not run."""
        self._threads = Threads(rule.concurrency)
        self._errors = RepeatedErrors(log, "reward_function_failed")
        self._failed_in_a_row = 0

    async def value(self, completion: RewardInput) -> float | RewardFailure:
        """Return the value of the function for `completion`, or the result of its failure.

        Raises:
            RewardFunctionFailed: the function has failed too many times in a row.
            Exception: raised by the function, if `on_failure` is "raise".
        """
        rule = self._rule
        try:
            async with self._permits:
                value = await self._finite(completion)
        except Exception as error:  # any exception of a user's function is the failure of one trajectory
            if rule.on_failure == "raise":
                raise
            self._count_failure(error, completion)
            if isinstance(rule.on_failure, str):
                message = str(error).removeprefix(f"{rule.name}: ")
                return RewardFailure(f"{rule.name}: {type(error).__name__}: {message}".rstrip(": "))
            return float(rule.on_failure)
        self._failed_in_a_row = 0
        return value

    def _count_failure(self, error: Exception, completion: RewardInput) -> None:
        """Log and count a failure.

        Raises:
            RewardFunctionFailed: it is the last of too many in a row.
        """
        name = self._rule.name
        self._errors.record(error, function=name, trajectory=completion.trajectory.id, error=repr(error))
        current().metrics.total(f"rewards/{name}/failed")
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= FAILURE_LIMIT:
            raise RewardFunctionFailed(
                f"expected {name} to return a number for at least one of {FAILURE_LIMIT} completions in a row, got a "
                f"failure for each, the last one {type(error).__name__}: {error}. Fix the function; the first "
                f"traceback of each error is in the log"
            ) from error

    async def _finite(self, completion: RewardInput) -> float:
        rule = self._rule
        with anyio.move_on_after(rule.reward_timeout_s):
            number = float(await self._threads.call(partial(rule.function, completion)))
            if not math.isfinite(number):
                raise ValueError(f"{rule.name}: expected a finite number, got {number}")
            return number
        raise TimeoutError(f"{rule.name}: expected a value within {rule.reward_timeout_s} s, got none")

    def close(self) -> None:
        """End the threads, each after its current call."""
        self._threads.close()
