"""What fails in passing is tried again; who is away is waited for. Knows neither what is tried nor how it fails."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import TypeVar

import anyio

from .backoff import Backoff

__all__ = ["WITHOUT_END", "Failure", "retried"]

T = TypeVar("T")

WITHOUT_END = 2**62
"""So many attempts never are."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What is to be thought of an attempt that failed."""

    error: Exception
    """What is raised where there is no other attempt."""
    passing: bool = True
    """Whether another attempt may succeed."""
    away: bool = False
    """Whether whoever was asked was not there: that is waited for by the clock, and costs no attempt."""
    wanted_s: float = 0.0
    """How long whoever was asked wants to be left alone; respected up to the longest pause."""


async def retried(
    attempt: Callable[[], Awaitable[T]],
    judge: Callable[[Exception, int], Failure | None],
    backoff: Backoff,
    draw: Callable[[], float],
    *,
    noted: Callable[[Failure], None] = lambda _: None,
    away_s: float = 0.0,
    sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """What `attempt` returns, tried as often as `backoff` says.

    Args:
        attempt: what is tried.
        judge: what to think of what it raised, at which attempt, the first being 1; None to let it through.
        backoff: how often, and what is waited in between.
        draw: draws from 0 to 1 for the pauses.
        noted: told of every failure after which it is tried again.
        away_s: how long whoever is asked may be away; with 0 that is a failure like others.
        sleep: waits so many seconds.
        clock: tells seconds, and never goes back.

    Raises:
        Exception: what `judge` made of the last failure.
    """
    pauses = backoff.pauses(draw)
    while_away: Iterator[float] = iter(())
    gone_at: float | None = None
    for number in count(1):
        try:
            return await attempt()
        except Exception as error:
            if (failure := judge(error, number)) is None:
                raise
            if not (failure.away and away_s):
                gone_at = None
                pause_s = next(pauses, None) if failure.passing else None
            elif gone_at is None:
                gone_at, while_away = clock(), replace(backoff, attempts=WITHOUT_END).pauses(draw)
                pause_s = next(while_away)
            else:
                pause_s = next(while_away) if clock() - gone_at < away_s else None
            if pause_s is None:
                raise failure.error from error
        noted(failure)
        await sleep(max(pause_s, min(failure.wanted_s, backoff.longest_s)))
    raise AssertionError  # counting has no end
