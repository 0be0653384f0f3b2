"""Every trajectory that a trainer was given ends once: in an optimizer step, or dropped."""

from __future__ import annotations

from penstock import TrajectoryId
from penstock._stages.integrations.flow_thread.deliveries import Deliveries


def trajectory(number: int) -> TrajectoryId:
    return TrajectoryId("env", str(number), 0)


def given(*keys: str) -> Deliveries[str, None]:
    """Return deliveries of one trajectory under each key, numbered from 0 on."""
    deliveries: Deliveries[str, None] = Deliveries()
    for number, key in enumerate(keys):
        assert deliveries.give(key, (trajectory(number),), None) == ()
    return deliveries


def test_a_step_has_trained_the_oldest_batches_and_not_those_made_ahead() -> None:
    deliveries = given("a", "b", "c")
    for key in "abc":
        deliveries.batch([key])

    deliveries.train()
    deliveries.train()
    deliveries.step()

    assert deliveries.stepped() == [trajectory(0), trajectory(1)]
    assert deliveries.stepped() == []
    assert repr(deliveries) == "<Deliveries: 0 given, 1 batches>"


def test_what_was_trained_counts_when_its_optimizer_step_is_done() -> None:
    deliveries = given("a")
    deliveries.batch(["a"])
    deliveries.train()

    assert deliveries.stepped() == []
    deliveries.step()
    assert deliveries.stepped() == [trajectory(0)]


def test_a_batch_that_is_used_several_times_counts_with_the_last_one() -> None:
    deliveries = given("a")
    deliveries.batch(["a"], parts=2)

    deliveries.train()
    deliveries.step()
    assert deliveries.stepped() == []

    deliveries.train()
    deliveries.step()
    assert deliveries.stepped() == [trajectory(0)]


def test_a_step_on_all_that_was_batched_leaves_what_was_only_given() -> None:
    deliveries = given("a", "b", "c")
    deliveries.batch(["a"])
    deliveries.batch(["b"])
    assert deliveries.is_batched(["x", "b"])

    deliveries.step_all()

    assert deliveries.stepped() == [trajectory(0), trajectory(1)]
    assert not deliveries.is_batched(["a", "b", "c"])
    assert list(deliveries.given) == ["c"]


def test_a_key_that_is_repeated_or_unknown_is_in_a_batch_once_or_not_at_all() -> None:
    deliveries = given("a")
    deliveries.batch(["a", "a", "given up"])
    deliveries.step_all()

    assert deliveries.stepped() == [trajectory(0)]


def test_what_was_dropped_is_in_no_batch() -> None:
    deliveries = given("a", "b")

    assert deliveries.drop(["a", "a"]) == (trajectory(0),)
    deliveries.batch(["a", "b"])
    assert deliveries.drop(["b"]) == ()
    deliveries.step_all()

    assert deliveries.stepped() == [trajectory(1)]


def test_what_is_given_again_before_it_was_trained_was_dropped() -> None:
    deliveries = given("a")

    assert deliveries.give("a", (trajectory(5),), None) == (trajectory(0),)
    assert deliveries.drop(deliveries.given.copy()) == (trajectory(5),)
