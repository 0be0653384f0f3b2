"""Components of a reward that are code: each judges completions one by one, or all completions of a group at once.

A component is a picklable description. A running stage opens it (this loads its model or starts its process), and calls
the function that it yields; `reward_calls` bounds, times and accounts the calls.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, Literal, TypeAlias

from ..._pipeline.errors import InvalidConfig
from ..._schemas.numbers import normalize_counts, normalize_numbers
from .reward_input import RewardInput

Verdict: TypeAlias = float | Mapping[str, Any] | None
"""The value of one completion: a finite number; None, if the function does not apply; or a mapping with a "score": its
other numbers are only metrics."""

JudgeOne: TypeAlias = Callable[[RewardInput], Verdict | Awaitable[Verdict]]
JudgeGroup: TypeAlias = Callable[[Sequence[RewardInput]], Sequence[Verdict] | Awaitable[Sequence[Verdict]]]
Judging: TypeAlias = JudgeOne | JudgeGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardComponent(ABC):
    """The options that every component has. Subclasses define `open`.

    Raises:
        InvalidConfig: a number out of range, or a component without a name.
    """

    name: str = ""
    """Of the part of the reward, and in metrics."""
    weight: float = 1.0
    """Factor of the value in the reward; metrics contain the value itself."""
    concurrency: int = 16
    """Bound on concurrent calls."""
    reward_timeout_s: float = 30.0
    """Bound on the time of one call."""
    on_failure: Literal["drop", "raise"] | float = "drop"
    """The rule for a completion whose call raises, times out or returns no finite number. "drop": it ends as failed,
    with the name and the error as reason; the rest of its group goes on. "raise": the pipeline fails. A number: that is
    the value, and the failure is counted."""
    batched: bool = False
    """True if a call judges all completions of a group: it takes a list, and returns as many values."""
    reads_text: bool = True
    """True if it reads the text of completions; if no component does, no token is decoded."""

    def __post_init__(self) -> None:
        """Check the options."""
        if not self.name:
            object.__setattr__(self, "name", self.default_name())
        normalize_counts(self, "concurrency")
        normalize_numbers(self, "reward_timeout_s")
        if isinstance(self.weight, bool) or not isinstance(self.weight, Real) or not math.isfinite(self.weight):
            raise InvalidConfig(f"{self.name}: weight: expected a finite number, got {self.weight!r}")
        if isinstance(self.on_failure, str):
            known = self.on_failure in {"drop", "raise"}
        else:
            known = math.isfinite(self.on_failure)
        if not known:
            raise InvalidConfig(f"on_failure: expected 'drop', 'raise' or a finite number, got {self.on_failure!r}")

    @abstractmethod
    def default_name(self) -> str:
        """Return the name of a component without a given one."""

    @abstractmethod
    def open(self) -> AbstractAsyncContextManager[Judging]:
        """Return a context manager that yields the function to call, with all it needs."""


@dataclass(frozen=True, slots=True)
class RewardFunction(RewardComponent):
    """A Python function as one component of the reward.

    >>> RewardFunction(lambda completion: 0.1 * completion.text.count("because"), name="reasons").name
    'reasons'

    It takes a `RewardInput` (with `batched`, a list of them), and returns a finite number; None, if it does not apply;
    or a mapping with a "score": its other numbers become metrics. An async function runs on the event loop, any other
    in a thread. Its name is the function's own by default.
    """

    function: Judging
    """Called for each completion, or with `batched` for each group."""

    def default_name(self) -> str:
        """Return the name of the function.

        Raises:
            InvalidConfig: it has none.
        """
        if (name := name_of(self.function)) == "<lambda>":
            raise InvalidConfig(f"name: expected one, {self.function!r} has none of its own")
        return name

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[Judging]:
        """Yield the function."""
        yield self.function


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, of the function of a partial, or of the class of an object."""
    if isinstance(function, partial):
        return name_of(function.func)
    return str(getattr(function, "__name__", type(function).__name__))
