"""What is done within ROLL's queue, against a queue of the recorded shape."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.roll.contract import CONTRACT

from penstock._stages.integrations.roll.group_queue import COMMIT, held_by, put_group

ROLLOUTS, ENVS = ["first", "second"], (4, 5)


@dataclass
class Group:
    group_id: int
    episode_id: int
    create_step: int
    rollouts: list[Any] = field(default_factory=list)


@dataclass
class Queue:
    """One GroupQueue of ROLL: takes rollouts, and may filter a group when it is whole."""

    groups: dict[int, Group]
    filters: bool = False
    group_filter_count: int = 0


class Manager:
    """The part of ROLL's GroupQueueManager that is used."""

    def __init__(self, *, filters: bool = False) -> None:
        self.group_queue = {2: Queue({7: Group(2, 7, create_step=3)}, filters)}
        self.pending_gets: set[asyncio.Future[Group]] = set()
        self.calls: list[tuple[Any, ...]] = []

    def put(self, group_id: int, episode_id: int, start_step: int, rollout: Any, env_id: int) -> None:
        self.calls.append((group_id, episode_id, start_step, rollout, env_id))
        queue = self.group_queue[group_id]
        queue.groups[episode_id].rollouts.append(rollout)
        if queue.filters and len(queue.groups[episode_id].rollouts) == len(ENVS):
            queue.group_filter_count += 1
            del queue.groups[episode_id]


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


def put(manager: Manager, number: int = 7, oldest: int = 3) -> tuple[str, int]:
    return put_group(manager, (2, number), (4, oldest), list(zip(ENVS, ROLLOUTS, strict=True)))


def test_the_commit_is_the_recorded_one() -> None:
    assert CONTRACT["commit"] == COMMIT


def test_a_group_is_put_rollout_by_rollout_with_the_arguments_that_roll_has() -> None:
    manager = Manager()

    assert put(manager) == ("taken", 3)

    assert manager.calls == [(2, 7, 4, "first", 4), (2, 7, 4, "second", 5)]
    assert CONTRACT["interfaces"]["GroupQueueManager.put"] == [
        "group_id",
        "episode_id",
        "start_step",
        "rollout",
        "env_id",
    ]


def test_nothing_is_put_for_an_episode_that_roll_has_dropped() -> None:
    manager = Manager()

    assert put(manager, number=6) == ("late", 0)
    assert manager.calls == []


def test_a_group_sampled_before_its_episode_was_created_is_not_put() -> None:
    manager = Manager()

    assert put(manager, oldest=2) == ("older", 3)
    assert manager.calls == []


def test_a_group_that_rolls_filter_drops_is_known_as_such() -> None:
    assert put(Manager(filters=True)) == ("filtered", 3)


def test_a_group_taken_out_for_a_later_batch_is_still_held(loop: asyncio.AbstractEventLoop) -> None:
    manager = Manager()
    waits, has = loop.create_future(), loop.create_future()
    has.set_result(Group(1, 5, create_step=3))
    manager.pending_gets = {waits, has}

    assert sorted(held_by(manager)) == [(1, 5), (2, 7)]
