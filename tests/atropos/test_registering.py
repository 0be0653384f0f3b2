"""Trainers and environments that register in the gateway's queue, and the answers that they get."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import pytest
from tests.atropos.builders import (
    admitted,
    env,
    group,
    new_queue,
    next_batch,
    payloads,
    refused,
    running_queue,
    trainer,
)


def test_before_a_trainer_registered_nothing_is_known() -> None:
    made = new_queue()

    assert asdict(made.info()) == {"batch_size": -1, "max_token_len": -1}
    assert asdict(made.wandb_info()) == {"group": None, "project": None}
    assert asdict(made.status()) == {"current_step": 0, "queue_size": 0}


def test_before_a_trainer_registered_there_are_no_batches_and_no_status_of_environments() -> None:
    made = new_queue()

    for ask in (lambda: next_batch(made, 0), lambda: made.env_status(0, 0)):
        with refused(409, "must call /register first"):
            ask()


def test_environments_get_the_numbers_of_the_trainer() -> None:
    made = new_queue()
    made.register_trainer(trainer(batch_size=16, starting_step=7))

    assert asdict(made.info()) == {"batch_size": 16, "max_token_len": 1_024}
    assert asdict(made.wandb_info()) == {"group": "group", "project": "project"}
    assert asdict(made.status()) == {"current_step": 7, "queue_size": 0}


def test_trainers_are_known_by_different_numbers_of_128_bits() -> None:
    made = new_queue()
    numbers = {made.register_trainer(trainer()) for _ in range(10)}

    assert len(numbers) == 10
    assert max(numbers).bit_length() in range(100, 129)


@pytest.mark.parametrize("batch_size", [-1, 0, 10**400])
def test_a_batch_size_out_of_range_is_refused(batch_size: int) -> None:
    with refused(422, f"batch_size from 1 to 1048576, got {batch_size}"):
        new_queue().register_trainer(trainer(batch_size=batch_size))


@pytest.mark.parametrize(
    "said", [{"max_token_length": 10**400}, {"weight": 1e300}, {"weight": math.nan}, {"minimum": 1e300}]
)
def test_numbers_out_of_range_are_refused(said: dict[str, Any]) -> None:
    with refused(422, "from -1e\\+12 to 1e\\+12"):
        running_queue().register_env(0, env(**said))


def test_a_minimum_below_nothing_is_none() -> None:
    made = running_queue(env(minimum=-1), env(minimum=0.25))

    assert made.env_status(0, 0).unallocated_fraction == 0.75


def test_environments_wait_until_a_trainer_asked_for_a_batch() -> None:
    made = new_queue()
    waiting = [made.register_env(0, env())]
    made.register_trainer(trainer(starting_step=3))
    waiting += [made.register_env(0, env())]
    next_batch(made, 0)

    assert waiting == [None, None]
    found = made.register_env(0, env(name="maze"))
    assert found is not None
    assert asdict(found) == {
        "env_id": 0,
        "wandb_name": "maze_0",
        "checkpoint_dir": "checkpoints",
        "starting_step": 3,
        "checkpoint_interval": 10,
        "num_steps": 100,
    }


def test_environments_wait_until_a_pipeline_asked_for_a_group() -> None:
    made = new_queue()
    made.register_trainer(trainer())
    made.take(0)

    assert admitted(made, env()) == 0


def test_environments_of_one_name_are_numbered_and_get_the_current_step() -> None:
    made = running_queue()
    made.submit(0, [group(), group()])
    next_batch(made, 0)
    answers = [made.register_env(0, env(name=name)) for name in ("maze", "sums", "maze")]

    assert [(each.env_id, each.wandb_name, each.starting_step) for each in answers if each] == [
        (0, "maze_0", 1),
        (1, "sums_0", 1),
        (2, "maze_1", 1),
    ]


def test_a_trainer_that_comes_back_is_the_one_that_runs_and_finds_what_waited() -> None:
    made = running_queue(env())
    made.submit(0, [group("a", env_id=0)])
    made.register_trainer(trainer(batch_size=4, starting_step=40))

    assert made.info().batch_size == 4
    assert payloads(next_batch(made, 0)) == ["a"]
    assert made.status().current_step == 41


def test_batches_that_were_formed_for_another_batch_size_are_formed_anew() -> None:
    made = running_queue(env(), env())
    made.submit(0, [group(number, env_id=number % 2) for number in range(6)])
    made.batch(0, lease_s=10)
    made.register_trainer(trainer(batch_size=4))
    depth = made.env_status(10, 0)
    left = [payloads(next_batch(made, 10)) for _ in range(7)]

    assert sorted(each for batch in left if batch for each in batch) == [0, 1, 2, 3, 4, 5]
    assert [len(batch) for batch in left if batch] == [1] * 6
    assert left[0] == [0]
    assert (depth.queue_size, made.env_status(10, 0).queue_size) == (4, 0)


def test_groups_of_a_batch_that_is_none_any_more_keep_their_order() -> None:
    made = running_queue(env())
    made.submit(0, [group(number, env_id=0) for number in range(3)])
    made.batch(0, lease_s=10)
    made.register_trainer(trainer(batch_size=4))

    assert [payloads(next_batch(made, 10)) for _ in range(3)] == [[0], [1], [2]]


@pytest.mark.parametrize("env_id", [-1, 1, 10**30])
def test_an_environment_that_never_registered_is_unknown(env_id: int) -> None:
    made = running_queue(env())

    for ask in (lambda: made.env_status(0, env_id), lambda: made.disconnect_env(env_id)):
        with refused(404, f"one of the 1 environments that registered, got {env_id}"):
            ask()


@pytest.mark.parametrize("size", [-1, 0, 9])
def test_a_group_size_that_is_in_no_batch_is_refused_when_it_registers(size: int) -> None:
    with refused(422, f"from 1 to the trainer's batch_size of 8, got {size}"):
        running_queue().register_env(0, env(size))


def test_what_was_submitted_before_a_trainer_registered_waits_for_it() -> None:
    made = new_queue()
    made.submit(0, [group("a"), group("b", env_id=0)])
    waited = made.stalls()
    made.register_trainer(trainer())

    assert waited == ["groups wait, and no trainer registered"]
    assert payloads(next_batch(made, 0)) == ["a", "b"]


def test_after_a_reset_all_is_as_new() -> None:
    made = running_queue(env())
    made.submit(0, [group(env_id=0), group(env_id=0)])
    batch = made.batch(0, lease_s=1)
    assert batch is not None
    made.submit(0, [group(), group(size=3, env_id=0)])
    made.reset()

    assert (made.info().batch_size, asdict(made.status()), made.latest) == (
        -1,
        {"current_step": 0, "queue_size": 0},
        None,
    )
    assert made.register_env(0, env()) is None
    with refused(404, "lease of an outstanding batch"):
        made.acknowledge(0, batch.lease)
    made.register_trainer(trainer())
    assert next_batch(made, 10) is None
