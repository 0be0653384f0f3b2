"""Python functions as components of a reward: sync or async, so many at a time, each with a deadline.

An async function runs on the event loop, any other in a thread. A sync function that is past its deadline cannot be
stopped: it is left to itself and keeps its thread, so that one that hangs again and again fails by timeout in the end
instead of taking ever more threads. No failure goes unaccounted: see `RewardFunction.on_failure`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import anyio
import msgspec

from ..._pipeline.context import current
from ..._pipeline.errors import RewardFunctionFailed
from ..._pipeline.failure_streak import FAILURE_LIMIT
from ..._pipeline.repeated_errors import RepeatedErrors
from ..._pipeline.telemetry import get_logger
from ..._schemas import Trajectory
from ..._schemas.numbers import normalize_counts, normalize_numbers
from ..threads import Threads

__all__ = ["Calls", "Failure", "RewardFunction", "RewardInput", "calling"]

log = get_logger("penstock.reward")


class RewardInput(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a reward function judges."""

    trajectory: Trajectory
    """The tokens, and everything else that travels with them."""
    score: float
    """The raw score, from the environment."""
    text: str
    """What the policy said, one line break between turns; empty where the function does not read text."""
    meta: dict[str, Any]
    """The meta of the group, e.g. the question."""


Judge: TypeAlias = Callable[[RewardInput], float | Awaitable[float]]


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A Python function as one component of the reward.

    >>> RewardFunction(lambda answer: 0.1 * answer.text.count("because"), name="reasons").name
    'reasons'

    Args:
        function: takes a `RewardInput`, returns a finite number.
        name: of the component; the function's own by default.
        concurrency: calls at a time.
        reward_timeout_s: how long one call may take.
        on_failure: what becomes of a trajectory for which the function raises, times out or returns no finite number.
            "drop": it ends as failed, with the function's name and the error as reason; the rest of its group goes on.
            "raise": the pipeline fails. A number: that is the component's value, and the failure is counted.
        reads_text: whether the function looks at `RewardInput.text`; where nobody does, nothing is decoded.

    Raises:
        ValueError: a number that makes no sense, or a function without a name.
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
class Failure:
    """Why there is no value for a trajectory, which is to be dropped."""

    reason: str


class Calls:
    """The calls of one function in one running stage: bounded, timed, accounted."""

    def __init__(self, rule: RewardFunction) -> None:
        self._rule = rule
        self._gate = anyio.Semaphore(rule.concurrency)
        """A call that waits here has not begun, so its deadline does not run."""
        self._threads = Threads(rule.concurrency)
        self._errors = RepeatedErrors(log, "reward_function_failed")
        self._failed_in_a_row = 0

    async def value(self, answer: RewardInput) -> float | Failure:
        """Return what the function says of `answer`, or what its failure counts as.

        Raises:
            RewardFunctionFailed: the function has failed too many times in a row.
            Exception: what the function raised, where `on_failure` is "raise".
        """
        rule = self._rule
        try:
            async with self._gate:
                value = await self._finite(answer)
        except Exception as error:  # whatever a user's function raises is one trajectory's failure
            if rule.on_failure == "raise":
                raise
            self._count_failure(error, answer)
            if isinstance(rule.on_failure, str):
                message = str(error).removeprefix(f"{rule.name}: ")
                return Failure(f"{rule.name}: {type(error).__name__}: {message}".rstrip(": "))
            return float(rule.on_failure)
        self._failed_in_a_row = 0
        return value

    def _count_failure(self, error: Exception, answer: RewardInput) -> None:
        """Log and count a failure.

        Raises:
            RewardFunctionFailed: it is the last of too many in a row.
        """
        name = self._rule.name
        self._errors.record(error, function=name, trajectory=answer.trajectory.id, error=repr(error))
        current().metrics.total(f"rewards/{name}/failed")
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= FAILURE_LIMIT:
            raise RewardFunctionFailed(
                f"expected {name} to return a number for at least one of {FAILURE_LIMIT} answers in a row, got a "
                f"failure for each, the last one {type(error).__name__}: {error}. Mend the function; the first "
                f"traceback of each error is in the log"
            ) from error

    async def _finite(self, answer: RewardInput) -> float:
        rule = self._rule
        with anyio.move_on_after(rule.reward_timeout_s):
            number = float(await self._called(answer))
            if not math.isfinite(number):
                raise ValueError(f"{rule.name}: expected a finite number, got {number}")
            return number
        raise TimeoutError(f"{rule.name}: expected an answer within {rule.reward_timeout_s} s, got none")

    async def _called(self, answer: RewardInput) -> float:
        function = self._rule.function
        if _is_async(function):
            value = function(answer)
        else:
            value = await self._threads.call(lambda: function(answer))
        return await value if inspect.isawaitable(value) else value

    def close(self) -> None:
        """Let the threads end."""
        self._threads.close()


@contextmanager
def calling(functions: Sequence[RewardFunction]) -> Iterator[dict[str, Calls]]:
    """The calls of each function, by name; threads end with the body."""
    calls = {rule.name: Calls(rule) for rule in functions}
    try:
        yield calls
    finally:
        for one in calls.values():
            one.close()


def _is_async(function: Judge) -> bool:
    called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004 (asked, not called)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)
