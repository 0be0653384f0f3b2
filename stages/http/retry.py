"""Retry temporary failures a bounded number of times; wait for an unreachable peer until a timeout.

Knows neither the attempt nor its errors. docs/decisions/0015 says why no library does this.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import TypeVar

import anyio

from ..._pipeline.graph.context import Worker
from ..._schemas.numbers import normalize_counts, normalize_numbers

T = TypeVar("T")

UNLIMITED = 2**62
"""More attempts than any run makes."""


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
    return random.Random(f"{worker.index} {worker.restart}").random  # noqa: S311 (spreads retries, protects no secret)


@dataclass(frozen=True, slots=True)
class RetryDecision:
    """The decision after a failed attempt."""

    error: Exception
    """Raised if there is no further attempt."""
    retryable: bool = True
    """True if another attempt may succeed."""
    unreachable: bool = False
    """True if the peer could not be reached: retried until a timeout, and not counted as an attempt."""
    retry_after_s: float = 0.0
    """Pause that the peer requested; respected up to the longest pause of the backoff."""


async def retry(
    attempt: Callable[[], Awaitable[T]],
    decide: Callable[[Exception, int], RetryDecision | None],
    backoff: Backoff,
    draw: Callable[[], float],
    *,
    on_retry: Callable[[RetryDecision], None] = lambda _: None,
    reconnect_timeout_s: float = 0.0,
    sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """Return the result of `attempt`, retried according to `backoff`.

    Args:
        attempt: called for each attempt.
        decide: given the exception and the number of the attempt, from 1; None to let the exception pass unchanged.
        backoff: number of attempts, and the pauses between them.
        draw: draws from 0 to 1 for the pauses.
        on_retry: called after every failure that is retried.
        reconnect_timeout_s: bound on the time that the peer may be unreachable; 0 makes that a failure like others.
        sleep: waits for so many seconds.
        clock: returns monotonic seconds.

    Raises:
        Exception: the error of the last decision.
    """
    pauses = backoff.pauses(draw)
    reconnect_pauses: Iterator[float] = iter(())
    unreachable_since: float | None = None
    for number in count(1):
        try:
            return await attempt()
        except Exception as error:
            if (decision := decide(error, number)) is None:
                raise
            if not (decision.unreachable and reconnect_timeout_s):
                unreachable_since = None
                pause_s = next(pauses, None) if decision.retryable else None
            elif unreachable_since is None:
                unreachable_since, reconnect_pauses = clock(), replace(backoff, attempts=UNLIMITED).pauses(draw)
                pause_s = next(reconnect_pauses)
            else:
                pause_s = next(reconnect_pauses) if clock() - unreachable_since < reconnect_timeout_s else None
            if pause_s is None:
                raise decision.error from error
        on_retry(decision)
        await sleep(max(pause_s, min(decision.retry_after_s, backoff.longest_s)))
    raise AssertionError  # `count` does not end
