"""What ROLL has trained, and what it has dropped, follows from what left its queue between two steps."""

from __future__ import annotations

import pytest

from penstock import TrajectoryId
from penstock._stages.integrations.roll.episodes import Episodes, QueuePlace

FIRST, SECOND = QueuePlace(0, 0), QueuePlace(1, 0)


def ids(prompt: int) -> tuple[TrajectoryId, ...]:
    return tuple(TrajectoryId("sums", str(prompt), repetition) for repetition in range(2))


@pytest.fixture
def episodes() -> Episodes:
    begun = Episodes(async_generation_ratio=1)
    begun.advance(0, ())
    return begun


def test_a_group_that_left_for_a_batch_is_trained_when_the_next_step_begins(episodes: Episodes) -> None:
    episodes.put(FIRST, ids(0), created=0)
    episodes.put(SECOND, ids(1), created=0)

    assert episodes.advance(1, {SECOND}) == (list(ids(0)), [])
    assert episodes.advance(2, set()) == (list(ids(1)), [])
    assert episodes.advance(3, set()) == ([], [])


def test_a_group_in_the_queue_is_neither_trained_nor_dropped(episodes: Episodes) -> None:
    episodes.put(FIRST, ids(0), created=0)

    assert episodes.advance(1, {FIRST}) == ([], [])
    assert "1 queued, step 1" in repr(episodes)


def test_a_group_that_was_too_old_for_the_batch_was_dropped(episodes: Episodes) -> None:
    episodes.put(FIRST, ids(0), created=0)
    assert episodes.advance(1, {FIRST}) == ([], [])
    assert episodes.advance(2, {FIRST}) == ([], [])  # its age, 2, is above the ratio in the batch that now begins

    assert episodes.advance(3, set()) == ([], list(ids(0)))


def test_a_group_of_the_oldest_age_that_roll_takes_is_trained(episodes: Episodes) -> None:
    episodes.put(FIRST, ids(0), created=0)
    episodes.advance(1, {FIRST})

    assert episodes.advance(2, set()) == (list(ids(0)), [])


def test_episodes_of_other_environments_in_the_queue_do_not_matter(episodes: Episodes) -> None:
    episodes.put(FIRST, ids(0), created=0)

    assert episodes.advance(1, {QueuePlace(7, 7)}) == (list(ids(0)), [])
