from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from penstock import Context, GroupId, Schedule
from penstock._pipeline.accounting.repetition_sets import trajectories
from penstock._stages.sampling.lag_limiter import LagLimiter
from penstock.accounting import Ledger
from penstock.testing import VirtualClock


class Trainer:
    """Admits groups of four and trains them, as a ledger sees it."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.groups: list[GroupId] = []

    def sample(self, groups: int = 1) -> None:
        for _ in range(groups):
            group = GroupId("test", str(len(self.groups)))
            self.groups.append(group)
            self.ledger.admit(group, range(4))

    def train(self, *numbers: int, step: int) -> None:
        self.ledger.commit_ids([each for number in numbers for each in trajectories(self.groups[number], 0b1111)], step)


class Sampling:
    """Those who sample, of whom a test says how many groups they hold."""

    groups_held = 0

    async def hold_none(self) -> None:
        """Return: no test waits for it."""


def limiter(trainer: Trainer, max_lag: int | None, samplers: Sampling | None = None, **known: Any) -> LagLimiter:
    """Return a limiter for groups of four."""
    schedule = Schedule(max_lag, known.pop("per_step", None))
    return LagLimiter(Context(trainer.ledger, schedule=schedule, **known), 4, samplers or Sampling())


async def stays_waiting(wait: Callable[[], Awaitable[None]]) -> bool:
    """Return whether `wait` still waits when all other tasks are blocked."""
    done = False

    async def waits() -> None:
        nonlocal done
        await wait()
        done = True

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(waits)
        for _ in range(5):
            await checkpoint()
        tasks.cancel_scope.cancel()
    return not done


async def test_nothing_is_held_back_without_a_bound_or_before_the_first_step() -> None:
    trainer = Trainer()
    trainer.sample(100)

    await limiter(trainer, 0).wait_for_slot()
    trainer.train(0, step=1)
    await limiter(trainer, None).wait_for_slot()


@pytest.mark.parametrize(("max_lag", "in_flight_at_most"), [(0, 8), (1, 16), (3, 32)])
async def test_a_group_is_begun_only_if_it_can_be_trained_within_the_bound(
    max_lag: int, in_flight_at_most: int
) -> None:
    trainer = Trainer()
    trainer.sample(2)
    trainer.train(0, 1, step=1)  # so a step trains 8
    pace = limiter(trainer, max_lag)

    while not await stays_waiting(pace.wait_for_slot):
        trainer.sample()

    assert trainer.ledger.in_flight == in_flight_at_most


async def test_a_step_is_never_left_short_of_trajectories() -> None:
    trainer = Trainer()
    trainer.sample(5)
    trainer.train(0, 1, 2, step=1)
    trainer.train(3, 4, step=2)  # so a step trains 10
    pace = limiter(trainer, 0)

    while not await stays_waiting(pace.wait_for_slot):
        trainer.sample()

    assert trainer.ledger.in_flight == 12


async def test_before_the_first_step_the_bound_is_that_of_the_batch_that_is_expected() -> None:
    trainer = Trainer()
    trainer.ledger.pace.expected = 8
    pace = limiter(trainer, 1)

    while not await stays_waiting(pace.wait_for_slot):
        trainer.sample()

    assert trainer.ledger.in_flight == 16


def test_before_the_first_step_the_trainer_is_given_ten_seconds_before_it_is_assumed_to_wait() -> None:
    clock = VirtualClock()

    async def main() -> None:
        trainer = Trainer()
        trainer.ledger.pace.expected = 8
        trainer.sample(2)
        await limiter(trainer, 0).wait_for_slot()

    clock.run(main)

    assert clock.now_s == 10


async def test_a_trained_group_makes_room_for_the_next() -> None:
    trainer = Trainer()
    trainer.sample(4)
    trainer.train(0, 1, step=1)
    pace = limiter(trainer, 0)
    assert await stays_waiting(pace.wait_for_slot)

    trainer.train(2, step=2)

    assert not await stays_waiting(pace.wait_for_slot)


def test_where_nothing_moves_for_the_time_of_two_steps_one_more_group_is_begun() -> None:
    clock, began = VirtualClock(), list[float]()

    async def main() -> None:
        trainer = Trainer()
        trainer.sample(6)
        trainer.train(0, 1, step=1)
        pace = limiter(trainer, 0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pace.wait_for_slot)
            await anyio.sleep(12)
            trainer.train(2, 3, step=2)
        for _ in range(2):
            trainer.sample()
            await pace.wait_for_slot()
            began.append(clock.now_s)

    clock.run(main)

    assert began == [12 + 24, 12 + 48]


def test_while_a_group_is_being_sampled_the_pace_does_not_give_way() -> None:
    clock = VirtualClock()

    async def main() -> None:
        trainer = Trainer()
        trainer.sample(4)
        trainer.train(0, 1, step=1)
        samplers = Sampling()
        pace = limiter(trainer, 0, samplers)

        async def sample() -> None:
            samplers.groups_held = 1
            await anyio.sleep(99.5)
            samplers.groups_held = 0

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sample)
            await checkpoint()
            await pace.wait_for_slot()

    clock.run(main)

    assert clock.now_s == 110


async def test_where_steps_train_fewer_than_is_stated_the_bound_is_that_of_their_mean() -> None:
    trainer = Trainer()
    trainer.sample(4)
    pace = limiter(trainer, 1, per_step=8)
    assert await stays_waiting(pace.wait_for_slot)

    trainer.train(0, step=1)  # so a step trains 4

    assert await stays_waiting(pace.wait_for_slot)
    assert pace.limit == 5


def test_where_steps_have_a_known_size_the_limit_is_exceeded_only_when_every_stage_waits() -> None:
    clock, waits = VirtualClock(), False

    async def main() -> None:
        nonlocal waits
        trainer = Trainer()
        pace = limiter(trainer, 0, per_step=8, all_wait=lambda: waits)
        trainer.sample(2)
        with anyio.move_on_after(1000) as waiting:
            await pace.wait_for_slot()
        assert waiting.cancelled_caught
        waits = True
        await pace.wait_for_slot()
        waits = False
        trainer.train(0, 1, step=1)
        await pace.wait_for_slot()

    clock.run(main)
