"""How long to wait before something that failed is tried again: exponentially longer, and never in step with others.

Knows neither what is tried nor a clock.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...pipeline.context import Worker
from ...schemas.numbers import normalize_counts, normalize_numbers

__all__ = ["Backoff", "jitter"]


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses between attempts.

    The bound doubles from pause to pause, and each pause is drawn evenly from nothing up to its bound ("full jitter"):
    clients that failed in the same moment do not come back in the same moment.

    >>> list(Backoff(attempts=4, first_s=1, longest_s=3).pauses(lambda: 1.0))
    [1.0, 2.0, 3.0]
    """

    attempts: int = 6
    """How often something is tried in all."""
    first_s: float = 0.5
    """Bound of the first pause."""
    longest_s: float = 30.0
    """No bound is above it."""

    def __post_init__(self) -> None:
        normalize_counts(self, "attempts")
        normalize_numbers(self, "first_s", "longest_s", zero=True)

    def pauses(self, draw: Callable[[], float]) -> Iterator[float]:
        """One pause between each two attempts; `draw` draws from 0 to 1."""
        bound_s = min(self.longest_s, self.first_s)
        for _ in range(self.attempts - 1):
            yield draw() * bound_s
            bound_s = min(self.longest_s, 2 * bound_s)


def jitter(worker: Worker) -> Callable[[], float]:
    """Draws from 0 to 1 for the pauses of `worker`: other workers draw others, and a run draws the same again."""
    return random.Random(f"{worker.index} {worker.incarnation}").random  # noqa: S311 (spreads retries, hides nothing)
