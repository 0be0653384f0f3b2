"""The numbers with which environments control their flow, and reports of stalls."""

from __future__ import annotations

import msgspec
import pytest
from tests.atropos.builders import env, group, running_queue, taken


def test_the_status_of_an_environment_counts_in_its_own_groups() -> None:
    made = running_queue(
        env(2, minimum=0.25, max_token_length=100), env(4, weight=3, max_token_length=200), batch_size=16
    )
    made.submit(0, [group(size=2, env_id=0)] * 3 + [group(size=4, env_id=1)] * 2 + [group(size=1)])

    assert msgspec.to_builtins(made.env_status(0, 0)) == {
        "current_step": 0,
        "queue_size": (6 + 8 + 4) // 2,  # its own, the other's, and a whole group of 4 without an environment
        "unallocated_fraction": 0.75,
        "self_queue_size": 3,
        "max_group_size": 4,
        "env_weight": 100 / 700,
    }
    assert made.env_status(0, 1).queue_size == (8 + (8 - 4) + 4) // 4  # of the other only what is beyond its minimum


def test_groups_of_others_do_not_count_where_all_have_one_sequence() -> None:
    made = running_queue(env(1), env(1))
    made.submit(0, [group(size=1, env_id=1)] * 5)

    assert made.env_status(0, 0).queue_size == 0


def test_unpackable_groups_do_not_count_for_other_environments() -> None:
    made = running_queue(env(3, name="threes"), env(4, name="fours"), batch_size=4)
    made.submit(0, [group(size=3, env_id=0)] * 4 + [group(size=4, env_id=1)])

    threes, fours = made.env_status(0, 0), made.env_status(0, 1)
    made.register_env(0, env(1))  # with ones, threes are in a batch
    again = made.env_status(0, 1)

    assert (threes.self_queue_size, threes.queue_size) == (4, (12 + 4) // 3)
    assert (fours.self_queue_size, fours.queue_size, fours.max_group_size) == (1, 1, 4)
    assert again.queue_size == (4 + 12) // 4


def test_groups_in_the_pipelines_channel_count_as_long_as_they_are_there() -> None:
    made = running_queue(env(), env())
    made.submit(0, [group(env_id=0), group(env_id=1), group(env_id=0)])
    taken(made)

    depths = [made.env_status(0, 0, downstream=downstream) for downstream in (3, 2, 1, 0)]

    assert [(each.queue_size, each.self_queue_size, each.max_group_size) for each in depths] == [
        (3, 2, 4),
        (2, 1, 4),
        (1, 1, 4),
        (0, 0, 1),
    ]
    assert made.status(downstream=3).queue_size == 3


def test_what_was_taken_is_not_remembered_for_ever_where_no_environment_asks() -> None:
    made = running_queue(env(1))
    for _ in range(4_200):
        made.submit(0, [group(size=1, env_id=0)])
        made.take(0)

    assert made.env_status(0, 0, downstream=5_000).self_queue_size == 4_096


def test_weights_of_nothing_are_no_division_by_nothing() -> None:
    made = running_queue(env(weight=0), env(weight=0))

    assert made.env_status(0, 0).env_weight == 0.01


def test_environments_that_disconnected_or_timed_out_have_no_allocation() -> None:
    made = running_queue(env(minimum=0.25), env(minimum=0.25), env(minimum=0.5), heartbeat_timeout_s=60)
    made.disconnect_env(0)
    left = made.env_status(30, 2).unallocated_fraction

    assert left == 0.25
    assert made.env_status(61, 2).unallocated_fraction == 0.5


def test_an_environment_times_out_while_others_send_requests() -> None:
    made = running_queue(env(minimum=0.25), env(minimum=0.5), heartbeat_timeout_s=60)
    made.env_status(50, 0)

    assert made.env_status(60, 0).unallocated_fraction == 0.75


def test_a_stall_is_logged_once_and_its_resolution_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    made = running_queue(env(3), batch_size=4)
    events: list[list[str]] = []
    for now in (0, 1, 5, 10, 15, 20):
        if now == 15:
            made.disconnect_env(0)
        made.env_status(now, 0)
        events.append([record.getMessage().split()[0] for record in caplog.records])

    assert events == [[], [], [], ["stalled"], ["stalled", "stall_resolved"], ["stalled", "stall_resolved"]]
    assert "groups of [3] are in no batch of 4" in caplog.text


def test_a_pipeline_packs_nothing_and_so_has_nothing_that_cannot_be_packed() -> None:
    made = running_queue(env(3), env(4), batch_size=4, batches=False)
    made.submit(0, [group(size=3, env_id=0)] * 4)

    assert made.stalls() == []
    assert made.env_status(0, 1).queue_size == 12 // 4


def test_counters_of_an_environment_add_up() -> None:
    made = running_queue(env(4, name="maze"), env(2))
    made.submit(5, [group(env_id=0), group(env_id=0), group(size=3, env_id=0)])
    made.take(5)
    made.disconnect_env(1)

    first, other = made.environments(7)

    assert (first.env_id, first.name, first.active) == (0, "maze_0", True)
    assert (other.env_id, other.name, other.active) == (1, "env_0", False)
    assert (first.submitted, first.taken, first.queued, first.buffered) == (11, 4, 4, 3)
