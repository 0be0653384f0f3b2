"""Every trajectory that SkyRL was given ends once: trained, without a token that trains, or dropped."""

from __future__ import annotations

from penstock import TrajectoryId
from penstock._stages.integrations.skyrl.deliveries import SkyRLDeliveries


def trajectory(number: int) -> TrajectoryId:
    return TrajectoryId("skyrl", str(number), 0)


def given(*keys: tuple[str, int]) -> SkyRLDeliveries:
    deliveries = SkyRLDeliveries()
    for number, key in enumerate(keys):
        assert deliveries.give(key, trajectory(number)) is None
    return deliveries


def test_what_is_in_the_batch_ends_with_its_step_and_once() -> None:
    deliveries = given(("a", 0), ("a", 1), ("b", 0))
    deliveries.batch([("a", 0), ("a", 1)], [True, False])

    assert deliveries.step() == ([trajectory(0)], [trajectory(1)])
    assert deliveries.step() == ([], [])
    assert deliveries.drop_rest() == [trajectory(2)]


def test_prompt_and_repetition_are_one_name_and_no_glued_text() -> None:
    deliveries = given(("a_1", 0), ("a", 10))
    deliveries.batch([("a", 10)], [True])

    assert deliveries.step().trained == [trajectory(1)]


def test_a_row_that_dynamic_sampling_repeats_is_trained_once() -> None:
    deliveries = given(("a", 0), ("b", 0))
    deliveries.batch([("a", 0), ("a", 0)], [True, True])

    assert deliveries.step().trained == [trajectory(0)]


def test_a_row_that_was_given_up_is_in_the_batch_and_nowhere_else() -> None:
    deliveries = given(("a", 0))
    deliveries.batch([("a", 0), ("a", 1)], [True, False])

    assert deliveries.step() == ([trajectory(0)], [])


def test_one_that_is_given_again_before_it_was_trained_was_dropped() -> None:
    deliveries = given(("a", 0))

    assert deliveries.give(("a", 0), trajectory(5)) == trajectory(0)
    assert deliveries.drop([("a", 0), ("a", 0)]) == [trajectory(5)]
