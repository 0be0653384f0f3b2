from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from penstock.stages.engines.backoff import Backoff
from penstock.stages.engines.retrying import Failure, retried


class Told(Exception):
    """What is made of the last failure."""


@dataclass
class Tries:
    """Fails as it is told, by a clock that only pauses move."""

    failures: list[Failure | None]
    slept: list[float] = field(default_factory=list)
    asked: int = 0

    async def attempt(self) -> str:
        self.asked += 1
        if self.asked <= len(self.failures):
            raise OSError
        return "answer"

    def judge(self, _: Exception, number: int) -> Failure | None:
        assert number == self.asked
        return self.failures[number - 1]

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    async def run(self, backoff: Backoff, away_s: float = 0.0, noted: Callable[[Failure], None] | None = None) -> str:
        return await retried(
            self.attempt,
            self.judge,
            backoff,
            lambda: 1.0,
            noted=noted or (lambda _: None),
            away_s=away_s,
            sleep=self.sleep,
            clock=lambda: sum(self.slept),
        )


THREE = Backoff(attempts=3, first_s=1.0, longest_s=4.0)
PASSING = Failure(Told(), passing=True)
AWAY = Failure(Told(), away=True)


async def test_what_passes_is_tried_again_as_often_as_it_may() -> None:
    noted: list[Failure] = []
    tries = Tries([PASSING, PASSING])

    assert await tries.run(THREE, noted=noted.append) == "answer"
    assert (tries.slept, noted) == ([1.0, 2.0], [PASSING, PASSING])
    with pytest.raises(Told):
        await Tries([PASSING] * 3).run(THREE)


async def test_what_does_not_pass_is_told_at_once_and_what_nobody_judges_is_let_through() -> None:
    for failure, error in ((Failure(Told(), passing=False), Told), (None, OSError)):
        tries = Tries([failure])
        with pytest.raises(error):
            await tries.run(THREE)
        assert tries.slept == []


async def test_who_wants_to_be_left_alone_is_up_to_the_longest_pause() -> None:
    tries = Tries([Failure(Told(), wanted_s=3.0), Failure(Told(), wanted_s=60.0)])

    await tries.run(THREE)

    assert tries.slept == [3.0, 4.0]


async def test_who_is_away_is_waited_for_by_the_clock_and_costs_no_attempt() -> None:
    tries = Tries([PASSING, *[AWAY] * 5, PASSING])

    assert await tries.run(THREE, away_s=14.0) == "answer"
    assert tries.slept == [1.0, 1.0, 2.0, 4.0, 4.0, 4.0, 2.0]

    away = Tries([AWAY] * 9)
    with pytest.raises(Told):
        await away.run(THREE, away_s=7.0)
    assert away.slept == [1.0, 2.0, 4.0]


async def test_without_a_time_to_be_away_it_is_a_failure_like_others() -> None:
    with pytest.raises(Told):
        await Tries([AWAY] * 3).run(THREE)
