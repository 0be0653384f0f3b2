from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

import pytest

from penstock._stages.http.retry import RetryDecision, retry
from penstock.policies import Backoff


class Explained(Exception):
    """The error of a decision."""


@dataclass
class Attempts:
    """Fail as listed, by a clock that only pauses advance."""

    decisions: list[RetryDecision | None]
    slept: list[float] = field(default_factory=list)
    made: int = 0

    async def attempt(self) -> str:
        self.made += 1
        if self.made <= len(self.decisions):
            raise OSError
        return "answer"

    def decide(self, _: Exception, number: int) -> RetryDecision | None:
        assert number == self.made
        return self.decisions[number - 1]

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    async def run(
        self,
        backoff: Backoff,
        reconnect_timeout_s: float = 0.0,
        on_retry: Callable[[RetryDecision], None] = lambda _: None,
    ) -> str:
        return await retry(
            self.attempt,
            self.decide,
            backoff,
            lambda: 1.0,
            on_retry=on_retry,
            reconnect_timeout_s=reconnect_timeout_s,
            sleep=self.sleep,
            clock=lambda: sum(self.slept),
        )


THREE = Backoff(attempts=3, first_s=1.0, longest_s=4.0)
RETRYABLE = RetryDecision(Explained(), retryable=True)
UNREACHABLE = RetryDecision(Explained(), unreachable=True)


async def test_a_retryable_failure_is_retried_for_the_attempts_of_the_backoff() -> None:
    retries: list[RetryDecision] = []
    attempts = Attempts([RETRYABLE, RETRYABLE])

    assert await attempts.run(THREE, on_retry=retries.append) == "answer"
    assert (attempts.slept, retries) == ([1.0, 2.0], [RETRYABLE, RETRYABLE])
    with pytest.raises(Explained):
        await Attempts([RETRYABLE] * 3).run(THREE)


async def test_other_failures_are_raised_at_once_and_those_without_a_decision_unchanged() -> None:
    for decision, error in ((RetryDecision(Explained(), retryable=False), Explained), (None, OSError)):
        attempts = Attempts([decision])
        with pytest.raises(error):
            await attempts.run(THREE)
        assert attempts.slept == []


async def test_a_pause_that_the_peer_asks_for_is_respected_up_to_the_longest_pause() -> None:
    attempts = Attempts([RetryDecision(Explained(), retry_after_s=3.0), RetryDecision(Explained(), retry_after_s=60.0)])

    await attempts.run(THREE)

    assert attempts.slept == [3.0, 4.0]


async def test_an_unreachable_peer_is_retried_by_the_clock_and_costs_no_attempt() -> None:
    attempts = Attempts([RETRYABLE, *[UNREACHABLE] * 5, RETRYABLE])

    assert await attempts.run(THREE, reconnect_timeout_s=14.0) == "answer"
    assert attempts.slept == [1.0, 1.0, 2.0, 4.0, 4.0, 4.0, 2.0]

    unreachable = Attempts([UNREACHABLE] * 9)
    with pytest.raises(Explained):
        await unreachable.run(THREE, reconnect_timeout_s=7.0)
    assert unreachable.slept == [1.0, 2.0, 4.0]


async def test_without_a_reconnect_timeout_an_unreachable_peer_is_a_failure_like_others() -> None:
    with pytest.raises(Explained):
        await Attempts([UNREACHABLE] * 3).run(THREE)


def test_bounds_double_up_to_the_longest_and_pauses_are_drawn_below_them() -> None:
    backoff = Backoff(attempts=6, first_s=1, longest_s=5)

    drawn = [list(backoff.pauses(random.Random(seed).random)) for seed in range(200)]  # noqa: S311 (no secret)

    assert list(backoff.pauses(lambda: 1.0)) == [1, 2, 4, 5, 5]
    for bound, pauses in zip([1, 2, 4, 5, 5], zip(*drawn, strict=True), strict=True):
        assert 0 <= min(pauses) < 0.1 * bound
        assert 0.9 * bound < max(pauses) < bound


def test_one_attempt_has_no_pause() -> None:
    assert list(Backoff(attempts=1).pauses(lambda: 1.0)) == []


def test_no_attempt_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Backoff\.attempts: expected a whole number of at least 1, got 0"):
        Backoff(attempts=0)


def test_pauses_may_go_on_for_ever() -> None:
    pauses = Backoff(attempts=2**62, first_s=1, longest_s=5).pauses(lambda: 1.0)

    assert list(islice(pauses, 2000))[-1] == 5
