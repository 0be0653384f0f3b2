"""What verl did with a group is known by the keys that it removes: trained, or dropped, with the reason."""

from __future__ import annotations

from penstock import TrajectoryId
from penstock._stages.integrations.flow_thread.flow_run import Drop
from penstock._stages.integrations.verl.requests import GroupBounds, VerlRequests

STALE = Drop("stale", "dropped by verl: older than trainer.v1.sampler.max_off_policy_threshold=2")
FLAT = Drop("filtered", "dropped by verl: no difference in reward")
SURPLUS = Drop("filtered", "dropped by verl: more groups than it trains")


def ids(number: int) -> tuple[TrajectoryId, ...]:
    return tuple(TrajectoryId("sums", str(number), repetition) for repetition in range(2))


def keys(uid: str) -> list[str]:
    return [f"{uid}_0_0", f"{uid}_1_0"]


def answered(limits: GroupBounds, *uids: str, step: int = 1, values: tuple[float, ...] = (1.0, 0.0)) -> VerlRequests:
    """Return requests of these prompts, each answered by the group of its number."""
    requests = VerlRequests(limits)
    requests.ask(uids, step)
    for number, _ in enumerate(uids):
        requests.answer(ids(number), step, list(values))
    return requests


def test_the_prompt_that_was_asked_for_first_is_answered_first() -> None:
    requests = VerlRequests(GroupBounds())
    requests.ask(["a", "b"], 1)
    requests.ask(["c"], 2)

    seen = []
    while (asked := requests.next()) is not None:
        seen.append(asked)
        requests.answer((), 0, [])

    assert seen == [("a", 1), ("b", 1), ("c", 2)]


def test_a_group_is_trained_when_its_rows_are_removed_after_its_prompt() -> None:
    requests = answered(GroupBounds(), "a", "b")

    assert requests.clear(["a"]) == ([], [])
    assert requests.clear(keys("a")) == ([*ids(0)], [])
    assert requests.clear(keys("a")) == ([], [])


def test_a_group_is_dropped_when_its_rows_are_removed_with_its_prompt() -> None:
    requests = answered(GroupBounds(), "a", "b")

    assert requests.clear([*keys("b"), "b"]) == ([], [(ids(1), SURPLUS)])


def test_the_reason_is_the_rule_that_the_group_breaks() -> None:
    limits = GroupBounds(max_off_policy_threshold=2, filter_metric="reward")
    old = answered(limits, "a", step=1)
    old.ask(["later"], 3)
    flat = answered(limits, "a", values=(0.5, 0.5))
    alone = answered(limits, "a", values=(0.5,))

    assert old.clear(["a", *keys("a")]).dropped == [(ids(0), STALE)]
    assert flat.clear(["a", *keys("a")]).dropped == [(ids(0), FLAT)]
    assert alone.clear(["a", *keys("a")]).dropped == [(ids(0), SURPLUS)]


def test_keys_of_others_are_ignored() -> None:
    requests = answered(GroupBounds(), "a")

    assert requests.clear(["unknown", "pad17_0_0", "unknown_0_0"]) == ([], [])


def test_a_checkpoint_commits_what_was_selected_before_its_rows_are_removed() -> None:
    requests = answered(GroupBounds(), "a", "b", "c")
    requests.clear(["a", "b"])

    assert requests.lying() == [*ids(2)]
    assert requests.train() == [*ids(0), *ids(1)]
    assert requests.clear([*keys("a"), *keys("b")]) == ([], [])


def test_prompts_without_a_group_fail_once() -> None:
    requests = VerlRequests(GroupBounds())
    requests.ask(["a", "b", "c"], 1)
    requests.answer(ids(0), 1, [1.0])

    assert requests.fail() == ["b", "c"]
    assert requests.fail() == []
    assert repr(requests) == "<Requests of step 1: 0 without a group, <Deliveries: 1 given, 0 batches>>"
