from __future__ import annotations

import json
import math
import pickle
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
from tests.stages.holding import lets_go_of_what_it_sent
from tests.stages.modes import GATHERING, MODES, of_score
from tests.stages.turns import of_turns

from penstock import AdvantageNormalizer, Context, TrajectoryGroup
from penstock.channels import memory_channel
from penstock.errors import InvalidRecord
from penstock.testing import drive, entered, group

BY_GROUP: list[Any] = ["grpo", "dr_grpo", "rloo", "opo"]


def normalizer(mode: Any, **more: Any) -> AdvantageNormalizer:
    return AdvantageNormalizer(mode, batch_groups=2 if mode in GATHERING else None, components=of_score(mode), **more)


def expecting(of: TrajectoryGroup, value: float = 0.0) -> TrajectoryGroup:
    """Return the same group with a critic that expected `value` everywhere."""
    return msgspec.structs.replace(of, values=np.full(len(of.tokens), value, np.float32))


def of_rewards(*rewards: float, instance_id: str = "0") -> TrajectoryGroup:
    return expecting(group(rewards=rewards, completion_lengths=[2] * len(rewards), instance_id=instance_id))


def per_token(filled: TrajectoryGroup) -> list[float]:
    assert filled.advantages is not None
    return [float(x) for x in filled.advantages]


def per_sequence(filled: TrajectoryGroup) -> list[float]:
    """Return the one value that each sequence has on its trained tokens."""
    assert filled.advantages is not None
    return [float(filled.advantages[end - 1]) for end in filled.offsets[1:].tolist()]


@pytest.mark.parametrize("mode", MODES)
async def test_advantages_stand_on_the_tokens_that_train_and_nowhere_else(mode: Any) -> None:
    given = [expecting(group(completion_lengths=[1, 3], rewards=[1, 0], instance_id=str(i))) for i in range(2)]

    out = await drive(normalizer(mode), given)

    for filled in out:
        assert filled.advantages is not None
        assert filled.advantages.dtype == np.float32
        assert not filled.advantages[~filled.loss_mask].any()
        for row in filled:
            assert row.advantages is not None
            assert len(set(row.advantages[row.loss_mask].tolist())) == 1


@pytest.mark.parametrize("mode", MODES)
async def test_everything_else_of_a_group_stays_as_it_is(mode: Any) -> None:
    given = of_rewards(1, 0)

    (out,) = await drive(normalizer(mode), [given])

    before, after = given.columns(), out.columns()
    assert after.keys() - before.keys() == {"advantages"}
    assert all(np.array_equal(column, after[name]) for name, column in before.items())
    assert (out.id, out.meta) == (given.id, given.meta)


async def test_none_takes_the_reward_itself() -> None:
    (out,) = await drive(normalizer("none"), [of_rewards(3, -1)])

    assert per_sequence(out) == [3, -1]


@pytest.mark.parametrize("mode", BY_GROUP)
async def test_modes_that_compare_within_a_group_give_exact_zeros_where_nothing_differs(mode: Any) -> None:
    out = await drive(normalizer(mode), [of_rewards(*[1 / 3] * 7), of_rewards(5, instance_id="1")])

    assert per_sequence(out[0]) == [0] * 7
    assert per_sequence(out[1]) == [0]


async def test_grpo_sees_one_group_at_a_time() -> None:
    out = await drive(normalizer("grpo"), [of_rewards(0, 1, 2), of_rewards(100, 300, instance_id="1")])

    assert per_sequence(out[0]) == pytest.approx([-1, 0, 1], abs=1e-5)
    assert per_sequence(out[1]) == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], abs=1e-5)


async def test_batch_compares_all_groups_that_were_gathered() -> None:
    out = await drive(
        AdvantageNormalizer("batch", batch_groups=2), [of_rewards(0, 1), of_rewards(2, 1, instance_id="1")]
    )

    deviation = np.std([0, 1, 2, 1], ddof=1)
    assert per_sequence(out[0]) + per_sequence(out[1]) == pytest.approx([-1 / deviation, 0, 1 / deviation, 0], abs=1e-5)


async def test_a_batch_of_one_reward_gives_exactly_zero() -> None:
    out = await drive(AdvantageNormalizer("batch", batch_groups=2), [of_rewards(1, 1), of_rewards(1, instance_id="1")])

    assert [x for filled in out for x in per_sequence(filled)] == [0, 0, 0]


async def test_the_rest_at_the_end_of_the_stream_is_a_batch_too() -> None:
    given = [of_rewards(0, 2, instance_id=str(i)) for i in range(3)]

    out = await drive(AdvantageNormalizer("batch", batch_groups=2), given)

    assert [filled.instance_id for filled in out] == ["0", "1", "2"]
    assert per_sequence(out[2]) == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], abs=1e-5)


async def test_gathered_groups_are_held_as_copies_so_that_slots_are_free_again() -> None:
    stage = AdvantageNormalizer("batch", batch_groups=2)
    feed, inbox = memory_channel[TrajectoryGroup](2)
    outbox, collected = memory_channel[TrajectoryGroup](2)
    slots = [of_rewards(0, 1), of_rewards(2, 3, instance_id="1")]
    expected = slots[0].tokens.copy()

    async with feed, inbox, outbox, collected, anyio.create_task_group() as tasks:
        with entered(Context()):
            tasks.start_soon(stage.run, inbox, outbox)
            await feed.send(slots[0])
            await anyio.wait_all_tasks_blocked()
            slots[0].tokens.flags.writeable = True
            slots[0].tokens[:] = -1  # the producer reuses the slot
            await feed.send(slots[1])
            first = await collected.receive()
            assert first.tokens.tolist() == expected.tolist()
            tasks.cancel_scope.cancel()


async def test_global_compares_with_everything_seen_so_far() -> None:
    out = await drive(normalizer("global"), [of_rewards(0, 2), of_rewards(1, 5, instance_id="1")])

    seen = [0, 2, 1, 5]
    assert per_sequence(out[1]) == pytest.approx([(r - 2) / np.std(seen, ddof=1) for r in (1, 5)], abs=1e-5)


async def test_global_goes_on_after_a_restart_as_if_there_had_been_none() -> None:
    groups = [of_rewards(i, 2 * i, 5, instance_id=str(i)) for i in range(6)]
    whole = await drive(normalizer("global"), groups)

    before, after = normalizer("global"), normalizer("global")
    await drive(before, groups[:3])
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    resumed = await drive(after, groups[3:])

    assert [per_sequence(g) for g in resumed] == [per_sequence(g) for g in whole[3:]]
    assert after.state_dict() == pickle.loads(pickle.dumps(after)).state_dict()  # noqa: S301 (our own bytes)


def test_a_state_of_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected the entries \['count', .*\], got \['momentum'\]"):
        normalizer("global").load_state_dict({"momentum": 0.9})


@pytest.mark.parametrize("mode", MODES)
async def test_masked_sequences_change_nothing_for_the_others(mode: Any) -> None:
    masked = expecting(of_turns(".x", ".x", "..", rewards=[0, 1, 1e6]), 0.25)
    without = expecting(of_turns(".x", ".x", rewards=[0, 1]), 0.25)

    (out,) = await drive(normalizer(mode), [masked])
    (expected,) = await drive(normalizer(mode), [without])

    assert per_sequence(out) == [*per_sequence(expected), 0]


@pytest.mark.parametrize("mode", MODES)
async def test_advantages_that_came_with_the_data_are_used_as_they_are(mode: Any) -> None:
    own = of_rewards(1, 0).with_advantages([7.0, -7.0])
    stage = normalizer(mode, clip=1.0)

    out = await drive(stage, [own])

    assert out[0].advantages is own.advantages
    assert stage.state_dict()["count"] == 0
    assert out.metrics.emit(0)["advantages/precomputed"] == 2


async def test_advantages_that_came_are_refused_where_they_are_no_numbers_and_train() -> None:
    good = of_turns(".x", ".x").with_advantages([0, 1, 0, -1])
    beside = msgspec.structs.replace(good, advantages=np.array([np.nan, 1, 0, -1], np.float32))
    bad = msgspec.structs.replace(good, advantages=np.array([0, 1, 0, -np.inf], np.float32))

    (out,) = await drive(normalizer("grpo"), [beside])
    assert out is beside
    with pytest.raises(InvalidRecord, match="test/0, repetition 1: advantages: expected finite values, got -inf"):
        await drive(normalizer("grpo"), [bad])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reward", [math.nan, math.inf])
async def test_a_reward_that_is_no_number_is_refused_with_the_id_of_its_trajectory(mode: Any, reward: float) -> None:
    rewards = np.array([0, reward], np.float32)
    bad = [msgspec.structs.replace(of_rewards(0, 1, instance_id=str(i)), rewards=rewards) for i in (17, 18)]

    with pytest.raises(InvalidRecord, match=f"test/17, repetition 1: rewards: expected finite values, got {reward}"):
        await drive(normalizer(mode), bad)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in GATHERING])
async def test_groups_that_come_together_are_treated_as_if_each_had_come_alone(mode: Any) -> None:
    lengths = [[1, 3], [0], [2, 5, 1, 1], [4]]
    given = [
        expecting(group(completion_lengths=of, rewards=[0.1 * (i + j) for j in range(len(of))], instance_id=str(i)))
        for i, of in enumerate([*lengths, *lengths])
    ]
    given[1] = given[1].with_advantages([0.5])
    given[2] = given[2].with_advantages(np.ones(4))
    together, alone = normalizer(mode), normalizer(mode)

    out = await drive(together, given)

    one_by_one = [filled for one in given for filled in await drive(alone, [one])]
    assert [filled.id for filled in out] == [one.id for one in given]
    for filled, expected in zip(out, one_by_one, strict=True):
        assert filled.advantages is not None
        assert expected.advantages is not None
        assert filled.advantages.tobytes() == expected.advantages.tobytes()
    assert together.state_dict() == alone.state_dict()


@pytest.mark.parametrize("mode", MODES)
async def test_sent_records_are_not_held_while_the_stage_waits_for_the_next(mode: Any) -> None:
    await lets_go_of_what_it_sent(normalizer(mode), [of_rewards(0, 1, instance_id=str(i)) for i in range(4)])


async def test_advantages_are_clipped_symmetrically_or_to_a_pair() -> None:
    (same,) = await drive(AdvantageNormalizer("dr_grpo", clip=1.5), [of_rewards(0, 4)])
    (pair,) = await drive(AdvantageNormalizer("dr_grpo", clip=(-1, 1.5)), [of_rewards(0, 4)])

    assert per_sequence(same) == [-1.5, 1.5]
    assert per_sequence(pair) == [-1, 1.5]


async def test_advantages_of_tokens_are_clipped_and_counted_one_by_one() -> None:
    given = of_turns(".xxx", ".x", "..", rewards=[4, -4, 99], values=[0, 3.5, 1, 0, 0, -3.5, 0, 0])

    out = await drive(AdvantageNormalizer("gae", clip=(-0.25, 3)), [given])

    assert per_token(out[0]) == [0, 0.5, 3, 3, 0, -0.25, 0, 0]  # without bounds the last two would be 4 and −0.5
    assert out.metrics.emit(0)["advantages/clip_fraction"] == 2 / 4


async def test_metrics_describe_the_rewards() -> None:
    given = [
        group(rewards=[0, 3], completion_lengths=[1, 3]),
        group(rewards=[1, 1], completion_lengths=[1, 1], instance_id="1"),
    ]

    out = await drive(AdvantageNormalizer("dr_grpo", clip=1.0), given)

    metrics = out.metrics.emit(0)
    assert metrics["advantages/clip_fraction"] == 0.5
    assert metrics["frac_reward_zero_std"] == 0.5
    assert metrics["reward_std"] == pytest.approx(np.std([0, 3], ddof=1) / 2)


async def test_a_group_of_empty_sequences_passes() -> None:
    empty = expecting(TrajectoryGroup.build(env="e", instance_id="0", sequences=[[]], loss_mask=[[]], rewards=[0.0]))

    for mode in MODES:
        (out,) = await drive(normalizer(mode), [empty])
        assert out.advantages is not None
        assert len(out.advantages) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "grop"}, r"mode: expected one of none, batch, .*reinforce\+\+-baseline, gae, got 'grop'"),
        ({"mode": "grpo", "clip": 0}, "clip: expected a positive number"),
        ({"mode": "grpo", "clip": -1}, "clip: expected a positive number"),
        ({"mode": "grpo", "clip": (1, 2)}, "clip: expected a positive number, or a pair with 0 between"),
        ({"mode": "grpo", "clip": float("nan")}, "clip: expected a positive number"),
        ({"mode": "batch"}, "batch_groups: expected a number with batch, gdpo, reinforce"),
        ({"mode": "reinforce++"}, r"batch_groups: expected a number with .* got none with reinforce\+\+"),
        ({"mode": "gae", "preset": "verl"}, "batch_groups: expected a number with .*, got none with gae"),
        ({"mode": "grpo", "batch_groups": 2}, "batch_groups: expected none with grpo, got 2"),
        ({"mode": "batch", "batch_groups": 0}, "batch_groups: expected a whole number of at least 1, got 0"),
        ({"mode": "grpo", "rewards": "tokens"}, "rewards: expected one of sequence, token, both, got 'tokens'"),
        ({"mode": "grpo", "preset": "vrel"}, "preset: expected one of verl, skyrl, trl, roll, got 'vrel'"),
        (
            {"mode": "opo", "preset": "trl"},
            "mode with preset 'trl': expected one of gdpo, grpo, dr_grpo, rloo, batch, got",
        ),
        ({"mode": "gae", "gamma": 1.01}, "gamma: expected a number from 0 to 1, got 1.01"),
        ({"mode": "gae", "gamma": float("nan")}, "gamma: expected a number from 0 to 1, got nan"),
        ({"mode": "grpo", "gamma": 0.9}, r"gamma: expected 1 but with reinforce\+\+ and gae, got 0.9 with grpo"),
        ({"mode": "gae", "gae_lambda": -0.1}, "gae_lambda: expected a number from 0 to 1, got -0.1"),
        (
            {"mode": "reinforce++", "batch_groups": 2, "gae_lambda": 0.9},
            r"gae_lambda: expected 1 but with gae, got 0.9 with reinforce\+\+",
        ),
        ({"mode": "gdpo", "batch_groups": 2}, "components: expected weights by name with gdpo, got None"),
        (
            {"mode": "gdpo", "batch_groups": 2, "components": {}},
            "components: expected weights by name with gdpo, got {}",
        ),
        ({"mode": "grpo", "components": {"a": 1}}, "components: expected none with grpo, got {'a': 1}"),
        (
            {"mode": "gdpo", "batch_groups": 2, "components": {"a": -1.0}},
            r"components\['a'\]: expected a finite number above 0, got -1.0",
        ),
        (
            {"mode": "gdpo", "batch_groups": 2, "components": {"a": 1.0}, "rewards": "both"},
            "rewards: expected sequence with gdpo, got both",
        ),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdvantageNormalizer(**arguments)


@pytest.mark.parametrize("given", [None, [1.0] * 6 + [2.0] * 6 + [3.0] * 6])
@pytest.mark.parametrize("mode", ["grpo", "batch", "gae"])
async def test_a_sequence_that_its_sender_silenced_is_compared_and_does_not_train(
    mode: Any, given: list[float] | None
) -> None:
    marked = {"overrides": [{}, {"set_advantage_to_zero": True}, {"set_advantage_to_zero": False}]}
    columns: dict[str, Any] = {"completion_lengths": [4] * 3, "rewards": [0, 1, 2], "advantages": given}
    plain, zero_advantages = (expecting(group(**columns, meta=meta)) for meta in ({}, marked))

    (expected,) = await drive(normalizer(mode), [plain])
    (out,) = await drive(normalizer(mode), [zero_advantages])

    assert out.advantages is not None
    assert expected.advantages is not None
    assert np.array_equal(out.advantages, np.where(out.sequence_of_token() == 1, 0, expected.advantages))
    assert np.array_equal(out.loss_mask, expected.loss_mask & (out.sequence_of_token() != 1))


async def test_silence_follows_a_sequence_by_its_repetition_id() -> None:
    marked = group(rewards=[0, 1], meta={"overrides": [{}, {"set_advantage_to_zero": True}]})

    (out,) = await drive(normalizer("none"), [marked.select(np.array([False, True]))])

    assert not out.loss_mask.any()


@pytest.mark.parametrize(
    "overrides", [[], [{}], "all", [None, 3], {"set_advantage_to_zero": True}, [{"temperature": 2}]]
)
async def test_other_overrides_change_nothing(overrides: object) -> None:
    given = group(rewards=[0, 1], meta={"overrides": overrides})

    (out,) = await drive(normalizer("grpo"), [given])

    assert out.loss_mask is given.loss_mask
