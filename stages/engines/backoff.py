"""Exponential backoff with full jitter. Knows neither the attempts nor a clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..._pipeline.graph.context import Worker
from ..._schemas.numbers import normalize_counts, normalize_numbers


@dataclass(frozen=True, slots=True)
class Backoff:
    """Number of attempts, and the pauses between them.

    The bound doubles from pause to pause, and each pause is drawn evenly from 0 to its bound ("full jitter"): clients
    that failed at the same moment do not retry at the same moment.

    >>> list(Backoff(attempts=4, first_s=1, longest_s=3).pauses(lambda: 1.0))
    [1.0, 2.0, 3.0]
    """

    attempts: int = 6
    """Attempts in all, the first included."""
    first_s: float = 0.5
    """Bound of the first pause."""
    longest_s: float = 30.0
    """Largest bound of any pause."""

    def __post_init__(self) -> None:
        normalize_counts(self, "attempts")
        normalize_numbers(self, "first_s", "longest_s", zero=True)

    def pauses(self, draw: Callable[[], float]) -> Iterator[float]:
        """Yield the pause in seconds between each two attempts; `draw` draws from 0 to 1."""
        bound_s = min(self.longest_s, self.first_s)
        for _ in range(self.attempts - 1):
            yield draw() * bound_s
            bound_s = min(self.longest_s, 2 * bound_s)


def jitter(worker: Worker) -> Callable[[], float]:
    """Return a source of numbers from 0 to 1 for the pauses of `worker`: repeatable, and different in every worker."""
    return random.Random(f"{worker.index} {worker.restart}").random  # noqa: S311 (spreads retries, hides nothing)
