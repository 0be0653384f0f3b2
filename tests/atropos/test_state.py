"""The gateway's books: every rule of the contract; nothing is lost, nothing comes twice, and memory is bounded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.atropos.builders import admitted, books, env, group, payloads, trainer

from penstock.stages.integrations.atropos.books.errors import (
    ImplausibleRegistration,
    NeverPacked,
    NoTrainer,
    QueueFull,
    RefusedByGateway,
    SubmissionTooLarge,
    UnknownEnvironment,
    UnknownLease,
)
from penstock.stages.integrations.atropos.books.records import (
    EnvAdmitted,
    EnvStatus,
    Info,
    Receipt,
    Status,
    Submission,
    WandbInfo,
)
from penstock.stages.integrations.atropos.books.state import Books, Habits

# -- who registers -----------------------------------------------------------------------------------------------------


def test_before_a_trainer_registered_nothing_is_known() -> None:
    made: Books[Any] = Books()

    assert made.info() == Info(batch_size=-1, max_token_len=-1)
    assert made.wandb_info() == WandbInfo(group=None, project=None)
    assert made.status() == Status(current_step=0, queue_size=0)


def test_before_a_trainer_registered_there_are_no_batches_and_no_status_of_environments() -> None:
    made: Books[Any] = Books()

    for ask in (lambda: made.batch(0), lambda: made.env_status(0, 0)):
        with pytest.raises(NoTrainer, match="is to call /register first"):
            ask()


def test_a_trainer_says_what_environments_are_told() -> None:
    made: Books[Any] = Books()
    made.register_trainer(trainer(batch_size=16, starting_step=7))

    assert made.info() == Info(batch_size=16, max_token_len=1_024)
    assert made.wandb_info() == WandbInfo(group="group", project="project")
    assert made.status() == Status(current_step=7, queue_size=0)


def test_trainers_are_known_by_different_numbers_of_128_bits() -> None:
    made: Books[Any] = Books()
    numbers = {made.register_trainer(trainer()) for _ in range(10)}

    assert len(numbers) == 10
    assert max(numbers).bit_length() in range(100, 129)


@pytest.mark.parametrize("batch_size", [-1, 0, 10**400])
def test_a_batch_size_that_nobody_has_is_refused(batch_size: int) -> None:
    with pytest.raises(ImplausibleRegistration, match=f"batch_size from 1 to 1048576, got {batch_size}"):
        Books[Any]().register_trainer(trainer(batch_size=batch_size))


@pytest.mark.parametrize(
    "said", [{"max_token_length": 10**400}, {"weight": 1e300}, {"weight": math.nan}, {"minimum": 1e300}]
)
def test_numbers_that_no_environment_has_are_refused(said: dict[str, Any]) -> None:
    with pytest.raises(ImplausibleRegistration, match="from -1e\\+12 to 1e\\+12"):
        books().register_env(0, env(**said))


def test_a_minimum_below_nothing_is_none() -> None:
    made = books(env(minimum=-1), env(minimum=0.25))

    assert made.env_status(0, 0).unallocated_fraction == 0.75


def test_environments_wait_until_a_trainer_asked_for_a_batch() -> None:
    made: Books[Any] = Books()
    waiting = [made.register_env(0, env())]
    made.register_trainer(trainer(starting_step=3))
    waiting += [made.register_env(0, env())]
    made.batch(0)

    assert waiting == [None, None]
    assert made.register_env(0, env(name="maze")) == EnvAdmitted(
        env_id=0,
        wandb_name="maze_0",
        checkpoint_dir="checkpoints",
        starting_step=3,
        checkpoint_interval=10,
        num_steps=100,
    )


def test_environments_wait_until_a_pipeline_asked_for_a_group() -> None:
    made: Books[Any] = Books()
    made.register_trainer(trainer())
    made.take(0)

    assert admitted(made, env()) == 0


def test_environments_of_one_name_are_numbered_and_those_that_register_later_are_told_the_step_that_is() -> None:
    made = books()
    made.submit(0, [group(), group()])
    made.batch(0)
    told = [made.register_env(0, env(name=name)) for name in ("maze", "sums", "maze")]

    assert [(each.env_id, each.wandb_name, each.starting_step) for each in told if each] == [
        (0, "maze_0", 1),
        (1, "sums_0", 1),
        (2, "maze_1", 1),
    ]


def test_a_trainer_that_comes_back_is_the_one_that_runs_and_finds_what_waited() -> None:
    made = books(env())
    made.submit(0, [group("a", env_id=0)])
    made.register_trainer(trainer(batch_size=4, starting_step=40))

    assert made.info().batch_size == 4
    assert payloads(made.batch(0)) == ["a"]
    assert made.status().current_step == 41


@pytest.mark.parametrize("habits", [Habits(), Habits(newest_first=True)])
def test_batches_that_were_formed_for_another_batch_size_are_formed_anew(habits: Habits) -> None:
    made = books(env(), env(), habits=habits)
    made.submit(0, [group(number, env_id=number % 2) for number in range(6)])
    made.batch(0, lease_s=10)
    made.register_trainer(trainer(batch_size=4))
    depth = made.env_status(10, 0)
    left = [payloads(made.batch(10)) for _ in range(7)]

    assert sorted(each for batch in left if batch for each in batch) == [0, 1, 2, 3, 4, 5]
    assert [len(batch) for batch in left if batch] == [1] * 6
    assert left[0 if not habits.newest_first else -2] == [0]
    assert (depth.queue_size, made.env_status(10, 0).queue_size) == (0 if habits.newest_first else 4, 0)


def test_groups_of_a_batch_that_is_none_any_more_keep_their_order() -> None:
    made = books(env())
    made.submit(0, [group(number, env_id=0) for number in range(3)])
    made.batch(0, lease_s=10)
    made.register_trainer(trainer(batch_size=4))

    assert [payloads(made.batch(10)) for _ in range(3)] == [[0], [1], [2]]


def test_the_first_trainer_stays_where_that_is_asked_for() -> None:
    made = books(habits=Habits(first_trainer_only=True))
    made.register_trainer(trainer(batch_size=4, starting_step=40))

    assert (made.info().batch_size, made.status().current_step) == (8, 0)


@pytest.mark.parametrize("env_id", [-1, 1, 10**30])
def test_an_environment_that_never_registered_is_unknown(env_id: int) -> None:
    made = books(env())

    for ask in (lambda: made.env_status(0, env_id), lambda: made.disconnect_env(env_id)):
        with pytest.raises(UnknownEnvironment, match=f"one of the 1 environments that registered, got {env_id}"):
            ask()


@pytest.mark.parametrize("size", [-1, 0, 9])
def test_a_group_size_that_is_in_no_batch_is_refused_when_it_registers(size: int) -> None:
    with pytest.raises(NeverPacked, match=f"from 1 to the trainer's batch_size of 8, got {size}"):
        books().register_env(0, env(size))


@pytest.mark.parametrize("size", [-1, 0, 9])
def test_it_is_admitted_where_that_is_asked_for_and_nothing_breaks(size: int) -> None:
    made = books(env(size), habits=Habits(keeps_the_unpackable=True))

    assert made.env_status(0, 0).queue_size == 0


def test_what_was_submitted_before_a_trainer_registered_waits_for_it() -> None:
    made: Books[Any] = Books()
    made.submit(0, [group("a"), group("b", env_id=0)])
    waited = made.stuck()
    made.register_trainer(trainer())

    assert waited == ["groups wait, and no trainer registered"]
    assert payloads(made.batch(0)) == ["a", "b"]


def test_after_a_reset_all_is_as_new() -> None:
    made = books(env())
    made.submit(0, [group(env_id=0), group(env_id=0)])
    batch = made.batch(0, lease_s=1)
    assert batch is not None
    assert batch.lease is not None
    made.submit(0, [group(), group(size=3, env_id=0)])
    made.reset()

    assert (made.info().batch_size, made.status(), made.latest) == (-1, Status(0, 0), None)
    assert made.register_env(0, env()) is None
    with pytest.raises(UnknownLease):
        made.acknowledge(0, batch.lease)
    made.register_trainer(trainer())
    assert made.batch(10) is None


# -- what is submitted -------------------------------------------------------------------------------------------------


def test_groups_of_their_environments_size_are_queued_and_the_last_is_the_latest() -> None:
    made = books(env())

    receipt = made.submit(0, [group("a", env_id=0), group("b", env_id=0)])

    assert receipt == Receipt(groups=2, buffered=0, buffer_size=None)
    assert made.status().queue_size == 2
    assert made.latest == group("b", env_id=0)


def test_smaller_groups_are_held_back_until_some_make_up_a_whole_one() -> None:
    made = books(env(4))
    sizes = [made.submit(0, [group(size, size, env_id=0)]).buffer_size for size in (3, 2, 3, 1)]

    assert sizes == [3, 5, 8, 5]
    assert [each.payload for each in taken(made)] == [3, 1]


def test_where_those_that_fit_from_the_front_do_not_make_up_a_whole_group_the_newest_that_do_are_taken() -> None:
    made = books(env(8))
    for name, size in (("a", 7), ("b", 3), ("c", 3), ("d", 5)):
        made.submit(0, [group(name, size, env_id=0)])

    assert [each.payload for each in taken(made)] == ["c", "d"]


def test_what_is_said_of_a_list_is_how_many_were_buffered_and_how_much_the_last_of_them_left() -> None:
    made = books(env(4), env(4))
    sizes = [(4, 0), (3, 0), (1, 0), (2, 1), (4, 1)]

    assert made.submit(0, [group(size=size, env_id=env_id) for size, env_id in sizes]) == Receipt(5, 3, 2)
    assert made.submit(0, []) == Receipt(0, 0, None)


def test_what_comes_of_nobody_known_is_queued_in_any_size() -> None:
    made = books(env(4))

    made.submit(0, [group(env_id, 3, env_id=env_id) for env_id in (None, 1, -1)])

    assert [each.payload for each in taken(made)] == [None, 1, -1]


def test_a_group_that_is_larger_than_its_environments_is_queued() -> None:
    made = books(env(2))

    assert made.submit(0, [group(size=3, env_id=0)]) == Receipt(1, 0, None)


def test_it_stays_in_the_buffer_where_that_is_asked_for() -> None:
    made = books(env(2), habits=Habits(keeps_the_unpackable=True))
    made.submit(0, [group(size=3, env_id=0)])

    assert made.stuck() == []
    assert made.submit(0, [group(size=3, env_id=0)]) == Receipt(1, 1, 6)
    assert made.stuck() == ["groups of [3] of env_0 do not make up its group_size of 2"]


@pytest.mark.parametrize("size", [0, 9])
def test_a_group_that_is_in_no_batch_is_refused_with_all_that_came_with_it(size: int) -> None:
    made = books(env(2))

    with pytest.raises(NeverPacked, match=f"groups of 1 to 8 sequences, got {size}"):
        made.submit(0, [group(size=2, env_id=0), group(size=size)])
    assert made.status().queue_size == 0


def test_sizes_that_never_make_up_a_whole_group_are_refused_at_last_and_not_kept_for_ever() -> None:
    made = books(env(4), capacity=None)

    for _ in range(21):
        made.submit(0, [group(size=3, env_id=0)])

    with pytest.raises(NeverPacked, match=r"got 66 sequences in groups of \[3\] that do not"):
        made.submit(0, [group(size=3, env_id=0)])
    assert made.stuck() == ["groups of [3] of env_0 do not make up its group_size of 4"]
    assert made.submit(0, [group(size=1, env_id=0)]).buffer_size == 60


def test_what_is_held_back_is_queued_when_its_environment_is_gone() -> None:
    made = books(env(4), env(4), silence_s=60)
    made.submit(0, [group("left", 3, env_id=0), group("silent", 1, env_id=1)])
    made.disconnect_env(0)
    made.expire(60)
    made.submit(60, [group("late", 3, env_id=0)])

    assert [each.payload for each in taken(made)] == ["left", "silent", "late"]


def test_it_stays_where_that_is_asked_for() -> None:
    made = books(env(4), habits=Habits(keeps_the_unpackable=True))
    made.submit(0, [group(size=3, env_id=0)])
    made.disconnect_env(0)

    assert taken(made) == []


def test_a_submission_for_which_there_is_no_room_is_refused_whole() -> None:
    made = books(env(), capacity=3)
    made.submit(0, [group(1, env_id=0), group(2, env_id=0)])

    with pytest.raises(QueueFull, match="room for 2 groups, got 1 of 3 free") as caught:
        made.submit(0, [group(3, env_id=0), group(4, env_id=0)])

    assert caught.value.retry_after_s == 1
    assert made.statistics(0)[0].refused == 1
    assert payloads(made.batch(0)) == [1, 2]
    assert made.submit(0, [group(3, env_id=0), group(4, env_id=0)]).groups == 2


def test_room_is_counted_in_bytes_too() -> None:
    made = books(env(), capacity_bytes=100)
    made.submit(0, [group(nbytes=60)])

    with pytest.raises(QueueFull, match="room for 41 bytes, got 40 of 100 free"):
        made.submit(0, [group(nbytes=41)])
    made.take(0)
    assert made.submit(0, [group(nbytes=41)]).groups == 1


def test_what_is_buffered_or_out_on_a_lease_takes_room() -> None:
    made = books(env(8), capacity=2)
    made.submit(0, [group(size=3, env_id=0), group(size=8)])
    batch = made.batch(0, lease_s=10)
    assert batch is not None
    assert batch.lease is not None

    with pytest.raises(QueueFull):
        made.submit(0, [group()])
    made.acknowledge(1, batch.lease)
    assert made.submit(1, [group()]).groups == 1


def test_what_will_never_find_room_is_refused_for_good() -> None:
    made = books(capacity=3, capacity_bytes=100)

    with pytest.raises(SubmissionTooLarge, match="at most 3 groups at once, got 4"):
        made.submit(0, [group()] * 4)
    with pytest.raises(SubmissionTooLarge, match="at most 100 bytes at once, got 101"):
        made.submit(0, [group(nbytes=101)])


@pytest.mark.parametrize(("since", "retry_after_s"), [(0.1, 1), (12, 12), (1_000, 30)])
def test_who_finds_no_room_is_told_to_come_again_after_as_long_as_nothing_has_left(
    since: float, retry_after_s: float
) -> None:
    made = books(capacity=1)
    made.submit(0, [group()])
    made.take(5)
    made.submit(5, [group()])

    with pytest.raises(QueueFull) as caught:
        made.submit(5 + since, [group()])
    assert caught.value.retry_after_s == pytest.approx(retry_after_s)


def test_a_body_whose_answer_was_not_delivered_is_accepted_once() -> None:
    made = books(env())
    sent = [group("a", env_id=0)]
    made.undelivered(0, b"digest", made.submit(0, sent, digest=b"digest"))

    assert made.submit(9, sent, digest=b"digest") == Receipt(1, 0, None)
    assert made.status().queue_size == 1
    made.submit(9, sent, digest=b"digest")
    assert made.status().queue_size == 2


def test_equal_bodies_that_were_answered_are_both_accepted() -> None:
    made = books(env())
    for _ in range(2):
        made.submit(0, [group("a", env_id=0)], digest=b"digest")

    assert made.status().queue_size == 2


def test_the_repetition_of_an_undelivered_body_is_not_waited_for_for_ever() -> None:
    made = books(env())
    sent = [group("a", env_id=0)]
    made.undelivered(0, b"digest", made.submit(0, sent, digest=b"digest"))
    made.submit(300, sent, digest=b"digest")

    assert made.status().queue_size == 2


# -- what is handed out ------------------------------------------------------------------------------------------------


def test_a_batch_without_a_lease_is_gone() -> None:
    made = books(batch_size=4)
    made.submit(0, [group("a")])
    batch = made.batch(0)

    assert batch is not None
    assert batch.lease is None
    assert made.batch(1e9) is None


def test_a_batch_that_is_not_acknowledged_in_time_is_handed_out_again_before_any_other() -> None:
    made = books(batch_size=4)
    made.submit(0, [group("a"), group("b"), group("c")])
    leases = [made.batch(now, lease_s=10 - 2 * now) for now in (0, 1)]

    assert [payloads(each) for each in leases] == [["a"], ["b"]]
    assert [payloads(made.batch(10)) for _ in range(4)] == [["a"], ["b"], ["c"], None]
    assert made.status().current_step == 3


def test_a_lease_ends_in_its_own_time_however_long_others_are() -> None:
    made = books(batch_size=4)
    made.submit(0, [group("a"), group("b")])
    for lease_s in (10, 100):
        made.batch(0, lease_s=lease_s)

    assert [payloads(made.batch(now)) for now in (9, 10, 99, 100)] == [None, ["a"], None, ["b"]]


def test_a_batch_that_is_acknowledged_is_not_handed_out_again() -> None:
    made = books(batch_size=4)
    made.submit(0, [group("a")])
    batch = made.batch(0, lease_s=10)
    assert batch is not None
    assert batch.lease is not None
    made.acknowledge(9, batch.lease)

    assert made.batch(10) is None
    with pytest.raises(UnknownLease, match=f"got {batch.lease}"):
        made.acknowledge(10, batch.lease)


def test_a_late_acknowledgement_counts_until_the_batch_is_out_again() -> None:
    made = books(batch_size=4)
    made.submit(0, [group("a"), group("b")])
    late, later = made.batch(0, lease_s=10), made.batch(0, lease_s=10)
    assert late is not None
    assert late.lease is not None
    assert later is not None
    assert later.lease is not None
    made.acknowledge(11, late.lease)

    assert payloads(made.batch(12)) == ["b"]
    with pytest.raises(UnknownLease):
        made.acknowledge(13, later.lease)


def test_what_was_formed_is_outstanding_until_it_is_somebodys_for_good() -> None:
    made = books(batch_size=4, habits=Habits(newest_first=True))
    made.submit(0, [group("a"), group("b"), group("c")])
    first, second = made.batch(0, lease_s=10), made.batch(0, lease_s=100)
    assert first is not None
    assert first.lease is not None
    assert second is not None
    assert second.lease is not None
    outstanding = [made.outstanding]  # two are out, one is ready
    made.batch(0)
    outstanding.append(made.outstanding)
    made.expire(10)
    outstanding.append(made.outstanding)  # one came back
    acknowledged = [payloads(made.acknowledge(10, lease)) for lease in (first.lease, second.lease)]

    assert outstanding == [3, 2, 2]
    assert acknowledged == [["c"], ["b"]]
    assert made.outstanding == 0


def test_a_batch_that_is_given_back_is_handed_out_again_at_once() -> None:
    made = books(batch_size=4)
    made.submit(0, [group("a"), group("b")])
    lost = made.batch(0, lease_s=10)
    assert lost is not None
    assert lost.lease is not None
    made.give_back(lost.lease)
    made.give_back(lost.lease)

    assert [payloads(made.batch(0)) for _ in range(3)] == [["a"], ["b"], None]


# -- what environments control their flow with -------------------------------------------------------------------------


def test_the_status_of_an_environment_counts_in_its_own_groups() -> None:
    made = books(env(2, minimum=0.25, max_token_length=100), env(4, weight=3, max_token_length=200), batch_size=16)
    made.submit(0, [group(size=2, env_id=0)] * 3 + [group(size=4, env_id=1)] * 2 + [group(size=1)])

    assert made.env_status(0, 0) == EnvStatus(
        current_step=0,
        queue_size=(6 + 8 + 4) // 2,  # its own, the other's, and a whole group of 4 that is nobody's
        unallocated_fraction=0.75,
        self_queue_size=3,
        max_group_size=4,
        env_weight=100 / 700,
    )
    assert made.env_status(0, 1).queue_size == (8 + (8 - 4) + 4) // 4  # of the other only what is beyond its minimum


def test_groups_of_others_do_not_count_where_all_have_one_sequence() -> None:
    made = books(env(1), env(1))
    made.submit(0, [group(size=1, env_id=1)] * 5)

    assert made.env_status(0, 0).queue_size == 0


def test_what_is_in_no_batch_is_in_nobodys_way() -> None:
    made = books(env(3, name="threes"), env(4, name="fours"), batch_size=4)
    made.submit(0, [group(size=3, env_id=0)] * 4 + [group(size=4, env_id=1)])

    threes, fours = made.env_status(0, 0), made.env_status(0, 1)
    made.register_env(0, env(1))  # with ones, threes are in a batch
    again = made.env_status(0, 1)

    assert (threes.self_queue_size, threes.queue_size) == (4, (12 + 4) // 3)
    assert (fours.self_queue_size, fours.queue_size, fours.max_group_size) == (1, 1, 4)
    assert again.queue_size == (4 + 12) // 4


def test_groups_in_the_pipelines_channel_count_as_long_as_they_are_there() -> None:
    made = books(env(), env())
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
    made = books(env(1))
    for _ in range(4_200):
        made.submit(0, [group(size=1, env_id=0)])
        made.take(0)

    assert made.env_status(0, 0, downstream=5_000).self_queue_size == 4_096


def test_weights_of_nothing_are_no_division_by_nothing() -> None:
    made = books(env(weight=0), env(weight=0))

    assert made.env_status(0, 0).env_weight == 0.01


def test_who_left_or_fell_silent_has_no_part_of_what_is_allocated() -> None:
    made = books(env(minimum=0.25), env(minimum=0.25), env(minimum=0.5), silence_s=60)
    made.disconnect_env(0)
    left = made.env_status(30, 2).unallocated_fraction

    assert left == 0.25
    assert made.env_status(61, 2).unallocated_fraction == 0.5


def test_one_falls_silent_however_often_those_before_it_are_heard() -> None:
    made = books(env(minimum=0.25), env(minimum=0.5), silence_s=60)
    made.env_status(50, 0)

    assert made.env_status(60, 0).unallocated_fraction == 0.75


def test_what_is_stuck_is_told_once_when_it_stays_so_and_once_when_it_is_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    made = books(env(3), batch_size=4)
    told: list[list[str]] = []
    for now in (0, 1, 5, 10, 15, 20):
        if now == 15:
            made.disconnect_env(0)
        made.env_status(now, 0)
        told.append([record.getMessage().split()[0] for record in caplog.records])

    assert told == [[], [], [], ["stuck"], ["stuck", "stuck_no_more"], ["stuck", "stuck_no_more"]]
    assert "groups of 3 are in no batch of 4" in caplog.text


def test_a_pipeline_packs_nothing_and_so_has_nothing_that_cannot_be_packed() -> None:
    made = books(env(3), env(4), batch_size=4, batches=False)
    made.submit(0, [group(size=3, env_id=0)] * 4)

    assert made.stuck() == []
    assert made.env_status(0, 1).queue_size == 12 // 4


def test_statistics_say_what_became_of_what_was_submitted() -> None:
    made = books(env(4, name="maze"), env(2))
    made.submit(5, [group(env_id=0), group(env_id=0), group(size=3, env_id=0)])
    made.take(5)
    made.disconnect_env(1)

    said, other = made.statistics(7)

    assert (said.env_id, said.name, said.connected, said.silent_s) == (0, "maze_0", True, 2)
    assert (other.env_id, other.name, other.connected, other.silent_s) == (1, "env_0", False, 7)
    assert (said.submitted, said.taken, said.queued, said.buffered) == (11, 4, 4, 3)


def taken(made: Books[Any]) -> list[Any]:
    return list(iter(lambda: made.take(0), None))


# -- anything, in any order --------------------------------------------------------------------------------------------

CAPACITY, CAPACITY_BYTES, LEASE_S, SILENCE_S = 12, 40, 10, 25


@dataclass(frozen=True)
class Accepted:
    """A group that was accepted: in which lane, and whether it was smaller than a whole group there."""

    sent: Submission[int]
    lane: int | None
    held_back: bool


@dataclass(frozen=True)
class Out:
    """A batch that is out: the how manieth it was, its groups, and when it comes back."""

    place: int
    numbers: list[int]
    due: float


class BooksMachine(RuleBasedStateMachine):
    """Whatever was accepted is in one place: it waits, is out on a lease, or was handed out for good."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.sizes = {0: 4, 1: 2}
        self.made = books(
            env(4), env(2, minimum=0.3), capacity=CAPACITY, capacity_bytes=CAPACITY_BYTES, silence_s=SILENCE_S
        )
        self.submitted = 0
        self.inside: dict[int, Accepted] = {}
        """What was accepted and was not handed out for good, by number."""
        self.out: dict[int, Out] = {}
        """Batches that were not acknowledged, by lease; those that are due are to be handed out again."""
        self.steps = 0
        self.left: dict[tuple[int | None, int], int] = {}
        """The number of the group that left last, by lane and size."""

    @rule(seconds=st.sampled_from([1.0, 6.0, 30.0]))
    def time_goes_by(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: len(self.sizes) < 4)
    @rule(size=st.sampled_from([1, 2, 4]))
    def register(self, size: int) -> None:
        self.sizes[admitted(self.made, env(size), self.now)] = size

    @rule(env_id=st.integers(0, 1))
    def ask(self, env_id: int) -> None:
        assert self.made.env_status(self.now, env_id).current_step == self.steps

    @precondition(lambda self: len(self.sizes) == 4)
    @rule(env_id=st.integers(2, 3))
    def leave(self, env_id: int) -> None:
        self.made.disconnect_env(env_id)

    @rule(
        env_id=st.none() | st.integers(0, 3),
        sizes=st.lists(st.none() | st.sampled_from([1, 2, 3, 8]), min_size=1, max_size=3),
        nbytes=st.integers(1, 5),
        lost=st.booleans(),
    )
    def submit(self, env_id: int | None, sizes: list[int | None], nbytes: int, lost: bool) -> None:  # noqa: FBT001
        lane = env_id if env_id in self.sizes else None
        whole = 4 if lane is None else self.sizes[lane]
        numbers = range(self.submitted, self.submitted + len(sizes))
        sent = [
            group(number, size or whole, env_id=env_id, nbytes=nbytes)
            for number, size in zip(numbers, sizes, strict=True)
        ]
        digest = b"%d" % self.submitted
        before = self.everything()
        try:
            receipt = self.made.submit(self.now, sent, digest=digest)
        except RefusedByGateway:
            assert self.everything() == before
            return
        if lost:
            self.made.undelivered(self.now, digest, receipt)
            assert self.made.submit(self.now, sent, digest=digest) == receipt
        self.submitted += len(sent)
        self.inside |= {
            each.payload: Accepted(each, lane, lane is not None and each.sequences < whole) for each in sent
        }
        assert receipt.groups == len(sent)

    def everything(self) -> object:
        statistics = [(each.queued, each.buffered, each.submitted) for each in self.made.statistics(self.now)]
        return self.made.status(), self.made.latest, statistics

    @rule(leased=st.booleans())
    def batch(self, leased: bool) -> None:  # noqa: FBT001
        back = min((out for out in self.out.values() if out.due <= self.now), key=lambda out: out.place, default=None)
        batch = self.made.batch(self.now, lease_s=LEASE_S if leased else None)
        if batch is None:
            assert back is None
            return
        assert sum(each.sequences for each in batch.groups) == 8
        numbers = [each.payload for each in batch.groups]
        if back is not None:
            assert numbers == back.numbers
            self.out = {lease: out for lease, out in self.out.items() if out is not back}
        else:
            self.steps += 1
            self.leave_the_queue(numbers)
        if batch.lease is None:
            self.handed_out(numbers)
        else:
            self.out[batch.lease] = Out(self.steps if back is None else back.place, numbers, self.now + LEASE_S)

    def leave_the_queue(self, numbers: list[int]) -> None:
        """None of these is out, and each is the oldest of its lane and size."""
        assert not {number for out in self.out.values() for number in out.numbers} & set(numbers)
        for number in numbers:
            accepted = self.inside[number]
            if not accepted.held_back:
                kind = accepted.lane, accepted.sent.sequences
                assert number > self.left.get(kind, -1)
                self.left[kind] = number

    def handed_out(self, numbers: list[int]) -> None:
        for number in numbers:
            del self.inside[number]

    @precondition(lambda self: self.out)
    @rule(pick=st.integers(0, 10))
    def acknowledge(self, pick: int) -> None:
        lease = sorted(self.out)[pick % len(self.out)]
        self.made.acknowledge(self.now, lease)
        self.handed_out(self.out.pop(lease).numbers)
        with pytest.raises(UnknownLease):
            self.made.acknowledge(self.now, lease)

    @rule()
    def take(self) -> None:
        one = self.made.take(self.now)
        if one is not None:
            self.leave_the_queue([one.payload])
            self.handed_out([one.payload])

    @invariant()
    def holds_what_it_accepted_and_no_more_than_it_may(self) -> None:
        assert (self.made.status().current_step, self.made._room.held) == (self.steps, len(self.inside))
        assert len(self.inside) <= CAPACITY
        assert sum(each.sent.nbytes for each in self.inside.values()) == self.made._room.held_bytes <= CAPACITY_BYTES

    def teardown(self) -> None:
        """Everything comes out, but for what waits for others to make up a whole group."""
        self.now += LEASE_S
        self.made.expire(self.now)
        for _ in range(len(self.out)):
            self.batch(leased=False)
        for _ in range(self.made.status().queue_size):
            self.take()
        assert self.made.status().queue_size == 0
        buffered = sum(each.buffered for each in self.made.statistics(self.now))
        assert sum(each.sent.sequences for each in self.inside.values()) == buffered
        assert all(each.held_back for each in self.inside.values())


TestBooks = BooksMachine.TestCase
TestBooks.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
