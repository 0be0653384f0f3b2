"""Parts of a benchmark within a time: each begins only before it is over, and what one of them raises ends no other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, TypeAlias

__all__ = ["Part", "Result", "Skipped", "run_parts"]

State: TypeAlias = Literal["measured", "left out", "failed"]


class Part(NamedTuple):
    """A measurement."""

    name: str
    measure: Callable[[float], dict[str, Any]]
    """Gets the seconds that are left, and returns the numbers."""


class Result(NamedTuple):
    """The end of a part."""

    part: str
    state: State
    reason: str
    """Empty for a part that was measured."""
    seconds: float
    numbers: dict[str, Any]


class Skipped(Exception):
    """This machine cannot run a part; the message is the reason."""


def run_parts(
    parts: Iterable[Part],
    seconds: float,
    report: Callable[[list[Result]], None],
    clock: Callable[[], float] = time.monotonic,
) -> list[Result]:
    """Run the parts in turn, and return their results; `report` gets all so far after each.

    A part begins if `seconds` have not passed since the first one began; others are left out.
    """
    results: list[Result] = []
    first = clock()
    for part in parts:
        began = clock()
        left = seconds - (began - first)
        state, reason, numbers = _measured(part, left) if left > 0 else ("left out", "time", {})
        results.append(Result(part.name, state, reason, clock() - began, numbers))
        report(results)
    return results


def _measured(part: Part, left: float) -> tuple[State, str, dict[str, Any]]:
    try:
        return "measured", "", part.measure(left)
    except Skipped as skipped:
        return "left out", str(skipped), {}
    except Exception as error:  # noqa: BLE001 (the machine is lent for minutes: the other parts still count)
        return "failed", f"{type(error).__name__}: {error}".splitlines()[0], {}
