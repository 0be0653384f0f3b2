"""Groups that are submitted to the gateway's queue: queued, buffered, or refused."""

from __future__ import annotations

import pytest
from tests.atropos.builders import env, group, next_batch, payloads, receipt, refused, running_queue, taken


def test_groups_of_their_environments_size_are_queued_and_the_last_is_the_latest() -> None:
    made = running_queue(env())

    answer = made.submit(0, [group("a", env_id=0), group("b", env_id=0)])

    assert answer == receipt(buffered=0, buffer_size=None)
    assert made.status().queue_size == 2
    assert made.latest == group("b", env_id=0)


def test_smaller_groups_are_buffered_until_some_make_up_a_whole_one() -> None:
    made = running_queue(env(4))
    sizes = [made.submit(0, [group(size, size, env_id=0)]).buffer_size for size in (3, 2, 3, 1)]

    assert sizes == [3, 5, 8, 5]
    assert [each.payload for each in taken(made)] == [3, 1]


def test_the_receipt_of_a_list_counts_its_buffered_groups_and_the_last_buffer() -> None:
    made = running_queue(env(4), env(4))
    sizes = [(4, 0), (3, 0), (1, 0), (2, 1), (4, 1)]

    assert made.submit(0, [group(size=size, env_id=env_id) for size, env_id in sizes]) == receipt(3, 2)
    assert made.submit(0, []) == receipt(0, None)


def test_groups_without_a_known_environment_are_queued_in_any_size() -> None:
    made = running_queue(env(4))

    made.submit(0, [group(env_id, 3, env_id=env_id) for env_id in (None, 1, -1)])

    assert [each.payload for each in taken(made)] == [None, 1, -1]


def test_a_group_that_is_larger_than_its_environments_is_queued() -> None:
    made = running_queue(env(2))

    assert made.submit(0, [group(size=3, env_id=0)]) == receipt(0, None)


@pytest.mark.parametrize("size", [0, 9])
def test_a_group_that_is_in_no_batch_is_refused_with_all_that_came_with_it(size: int) -> None:
    made = running_queue(env(2))

    with refused(422, f"groups of 1 to 8 sequences, got {size}"):
        made.submit(0, [group(size=2, env_id=0), group(size=size)])
    assert made.status().queue_size == 0


def test_sizes_that_never_make_up_a_whole_group_are_refused_at_last_and_not_kept_for_ever() -> None:
    made = running_queue(env(4), capacity=None)

    for _ in range(21):
        made.submit(0, [group(size=3, env_id=0)])

    with refused(422, r"got 63 sequences in groups of \[3\] that do not"):
        made.submit(0, [group(size=3, env_id=0)])
    assert made.submit(0, [group(size=1, env_id=0)]).buffer_size == 60


def test_buffered_groups_are_queued_when_their_environment_disconnects() -> None:
    made = running_queue(env(4), env(4), heartbeat_timeout_s=60)
    made.submit(0, [group("left", 3, env_id=0), group("timed out", 1, env_id=1)])
    made.disconnect_env(0)
    made.expire(60)
    made.submit(60, [group("late", 3, env_id=0)])

    assert [each.payload for each in taken(made)] == ["left", "timed out", "late"]


def test_a_submission_for_which_there_is_no_room_is_refused_whole() -> None:
    made = running_queue(env(), capacity=3)
    made.submit(0, [group(1, env_id=0), group(2, env_id=0)])

    with refused(503, "room for 2 groups, got 1 of 3 free.*: submit again in 1 s"):
        made.submit(0, [group(3, env_id=0), group(4, env_id=0)])

    assert payloads(next_batch(made, 0)) == [1, 2]
    assert made.submit(0, [group(3, env_id=0), group(4, env_id=0)]).buffered == 0


def test_whole_groups_of_a_list_are_queued_however_many_pieces_it_brings() -> None:
    made = running_queue(env(2))

    assert made.submit(0, [group(size=1, env_id=0)] * 100) == receipt(100, 0)
    assert len(taken(made)) == 100


def test_room_is_counted_in_bytes_too() -> None:
    made = running_queue(env(), capacity_bytes=100)
    made.submit(0, [group(nbytes=60)])

    with refused(503, "room for 41 bytes, got 40 of 100 free"):
        made.submit(0, [group(nbytes=41)])
    made.take(0)
    assert made.submit(0, [group(nbytes=41)]).buffered == 0


def test_what_is_buffered_or_out_on_a_lease_takes_room() -> None:
    made = running_queue(env(8), capacity=2)
    made.submit(0, [group(size=3, env_id=0), group(size=8)])
    batch = made.batch(0, lease_s=10)
    assert batch is not None

    with refused(503, "room for 1 groups, got [01] of 2 free"):
        made.submit(0, [group()])
    made.acknowledge(1, batch.lease)
    assert made.submit(1, [group()]).buffered == 0


def test_what_will_never_find_room_is_refused_for_good() -> None:
    made = running_queue(capacity=3, capacity_bytes=100)

    with refused(413, "at most 3 groups at once, got 4"):
        made.submit(0, [group()] * 4)
    with refused(413, "at most 100 bytes at once, got 101"):
        made.submit(0, [group(nbytes=101)])


def test_a_body_whose_answer_was_not_delivered_is_accepted_once() -> None:
    made = running_queue(env())
    sent = [group("a", env_id=0)]
    made.remember_undelivered(0, b"digest", made.submit(0, sent, digest=b"digest"))

    assert made.submit(9, sent, digest=b"digest") == receipt(0, None)
    assert made.status().queue_size == 1
    made.submit(9, sent, digest=b"digest")
    assert made.status().queue_size == 2


def test_equal_bodies_that_were_answered_are_both_accepted() -> None:
    made = running_queue(env())
    for _ in range(2):
        made.submit(0, [group("a", env_id=0)], digest=b"digest")

    assert made.status().queue_size == 2


def test_the_repetition_of_an_undelivered_body_is_not_waited_for_for_ever() -> None:
    made = running_queue(env())
    sent = [group("a", env_id=0)]
    made.remember_undelivered(0, b"digest", made.submit(0, sent, digest=b"digest"))
    made.submit(600, sent, digest=b"digest")

    assert made.status().queue_size == 2
