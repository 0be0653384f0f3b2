"""GDPO: each part of the reward is scaled within its group, and the sum is whitened over the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from tests.stages.trainer_libraries import Row, trl_gdpo, verl_gdpo

from penstock import AdvantageNormalizer, RewardBridge, TrajectoryGroup
from penstock.errors import InvalidRecord
from penstock.rewards import RewardFunction
from penstock.testing import drive, group

WEIGHTS = {"right": 1.0, "short": 0.5, "polite": 0.01}


def of_parts(number: int = 0, **parts: Sequence[float]) -> TrajectoryGroup:
    """Return sequences of one trained token each, with these parts and their sum as reward."""
    values = [np.array(part, np.float64) for part in parts.values()]
    total = np.sum(values, axis=0)
    size = len(total)
    return group(
        completion_lengths=[1] * size, prompt_length=1, rewards=total, reward_parts=parts, instance_id=str(number)
    )


def gdpo(groups: Sequence[TrajectoryGroup], weights: Mapping[str, float], **more: Any) -> AdvantageNormalizer:
    return AdvantageNormalizer("gdpo", batch_groups=len(groups), components=weights, **more)


async def advantages(groups: Sequence[TrajectoryGroup], weights: Mapping[str, float], **more: Any) -> list[float]:
    """Return the advantage of each sequence, of one trained token each."""
    out = await drive(gdpo(groups, weights, **more), groups)
    return [float(a) for filled in out if filled.advantages is not None for a in filled.advantages[filled.loss_mask]]


def grpo(values: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    of = np.array(values, np.float64)
    return np.asarray((of - of.mean()) / (of.std(ddof=1) + 1e-6))


async def test_parts_are_scaled_within_their_group_and_their_sum_over_the_batch() -> None:
    first = {"right": [1.0, 0.0, 0.0, 1.0], "short": [8.0, 4.0, 2.0, 0.0]}
    second = {"right": [0.0, 0.0, 0.0, 1.0], "short": [3.0, 3.0, 3.0, 3.0]}
    total = np.concatenate(
        [
            2 * grpo(first["right"]) + grpo([8 / 0.5, 4 / 0.5, 2 / 0.5, 0]) * 0.5,
            2 * grpo(second["right"]),
        ]
    )

    found = await advantages([of_parts(0, **first), of_parts(1, **second)], {"right": 2.0, "short": 0.5})

    assert found == pytest.approx(((total - total.mean()) / (total.std(ddof=1) + 1e-6)).tolist(), abs=1e-5)


async def test_a_part_of_small_values_counts_as_much_as_one_of_large_values() -> None:
    small = of_parts(right=[1, 0, 0, 0], short=[0, 0, 0, 0.001])
    large = of_parts(right=[1, 0, 0, 0], short=[0, 0, 0, 1000])

    found = await advantages([small], {"right": 1.0, "short": 1.0})

    assert found == pytest.approx(await advantages([large], {"right": 1.0, "short": 1.0}), rel=1e-2)
    assert found[0] == pytest.approx(found[3], rel=1e-2)


async def test_a_group_trains_whose_rewards_are_equal_but_not_their_parts() -> None:
    given = of_parts(right=[1, 0, 0.5], short=[0, 1, 0.5])

    found = await advantages([given], {"right": 1.0, "short": 0.25})

    assert found == pytest.approx([1, -1, 0], abs=1e-4)


# -- as the libraries ------------------------------------------------------------------------------------------------


def of_many_turns(random: np.random.Generator, number: int, size: int) -> tuple[TrajectoryGroup, list[Row]]:
    """Return sequences with text of an environment inside, some masked entirely, and their rows."""
    masks = [random.random(length) < 0.8 for length in random.integers(1, 9, size)]
    masks[0] &= size != 3  # a group of three has a masked sequence
    values = {name: random.integers(0, 3, size) / 2 for name in WEIGHTS}
    weighted = {name: WEIGHTS[name] * value for name, value in values.items()}
    built = TrajectoryGroup.build(
        env="e",
        instance_id=str(number),
        sequences=[[1] * (1 + len(mask)) for mask in masks],
        loss_mask=[[False, *mask.tolist()] for mask in masks],
        rewards=np.sum(list(weighted.values()), axis=0),
        reward_parts=weighted,
    )
    parts = np.array(list(values.values())).T.tolist()
    return built, [Row(number, m.astype(int).tolist(), [], [], tuple(p)) for m, p in zip(masks, parts, strict=True)]


@pytest.mark.parametrize(("library", "formula"), [("verl", verl_gdpo), ("trl", trl_gdpo)])
async def test_a_preset_gives_the_numbers_of_its_library(
    library: Any, formula: Callable[[Sequence[Row], Sequence[float]], list[list[float]]]
) -> None:
    random = np.random.default_rng(3)
    pairs = [of_many_turns(random, number, size) for number, size in enumerate([1, 5, 3, 4])]
    rows = [row for _, of_group in pairs for row in of_group]
    groups = [built for built, _ in pairs]

    out = await drive(gdpo(groups, WEIGHTS, preset=library), groups)

    found = [row.advantages for filled in out for row in filled if row.advantages is not None]
    for row, expected in zip(found, formula(rows, list(WEIGHTS.values())), strict=True):
        assert row.tolist() == pytest.approx([0, *expected], rel=1e-4, abs=2e-5)


async def test_without_a_preset_groups_in_which_nothing_differs_do_not_enter_the_batch() -> None:
    """The advantages of the others would grow with the number of solved prompts, as TRL's do."""
    open_question, solved = of_parts(0, right=[1, 0]), of_parts(1, right=[1, 1])
    scaled = 1 / 2**0.5

    assert await advantages([open_question, solved], {"right": 1.0}) == pytest.approx([scaled, -scaled, 0, 0], abs=1e-5)
    assert await advantages([open_question, solved], {"right": 1.0}, preset="trl") == pytest.approx(
        [1.5**0.5, -(1.5**0.5), 0, 0], rel=1e-3
    )


# -- weights of a bridge ---------------------------------------------------------------------------------------------


def _right(answer: Any) -> float:
    return float(answer.meta["right"][answer.trajectory.id.repetition_id])


def _long(answer: Any) -> float:
    return float(answer.meta["long"][answer.trajectory.id.repetition_id])


async def test_the_weights_of_a_bridge_are_those_of_its_functions() -> None:
    functions = [
        RewardFunction(_right, name="right", weight=2.0, reads_text=False),
        RewardFunction(_long, name="long", weight=-0.25, reads_text=False),
        RewardFunction(_long, name="unused", weight=0.0, reads_text=False),
    ]
    bridge = RewardBridge.from_config({"length_bounty": {"reward": 0.5, "cap": 4}}, functions=functions)
    meta = {"right": [1, 0, 0, 1], "long": [0, 3, 1, 2]}
    given = group(completion_lengths=[1] * 4, prompt_length=1, rewards=[0] * 4, meta=meta)

    weights = bridge.part_weights()
    found = await advantages(await drive(bridge, [given]), weights)

    assert weights == {"score": 1.0, "length_bounty": 1.0, "right": 2.0, "long": 0.25}
    total = 2 * grpo(meta["right"]) - 0.25 * grpo(meta["long"])
    assert found == pytest.approx((total / (total.std(ddof=1) + 1e-6)).tolist(), rel=1e-4)


async def test_the_reward_is_the_score_of_groups_without_parts() -> None:
    plain = group(completion_lengths=[1, 1], prompt_length=1, rewards=[3, 1])

    assert await advantages([plain], {"score": 1.0}) == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-5)


async def test_a_group_without_a_part_is_refused_with_its_id() -> None:
    lacking = of_parts(17, right=[1, 0], polite=[0, 0])

    with pytest.raises(InvalidRecord, match="test/17: reward_parts: expected short, got polite, right"):
        await advantages([of_parts(0, right=[1, 0], short=[0, 1]), lacking], {"right": 1.0, "short": 1.0})


# -- extremes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", [None, "verl", "trl"])
@pytest.mark.parametrize("value", [0.0, 1 / 3, -7e5])
async def test_equal_parts_have_advantages_of_exactly_zero(preset: Any, value: float) -> None:
    given = [of_parts(number, right=[value] * 7, short=[0.1] * 7) for number in range(3)]

    assert await advantages(given, {"right": 1.0, "short": 3.0}, preset=preset) == [0.0] * 21


async def test_a_sequence_alone_has_advantage_zero() -> None:
    assert await advantages([of_parts(right=[5.0])], {"right": 1.0}) == [0.0]


@pytest.mark.parametrize("scale", [1.0, 0.1, 3e4])
async def test_parts_that_cancel_but_for_rounding_have_advantages_of_exactly_zero(scale: float) -> None:
    values = [0.1, 0.7, 0.3, 0.9]
    given = of_parts(right=values, short=[-scale * value * 3 / 7 for value in values])

    assert await advantages([given], {"right": 1.0, "short": 1.0}) == [0.0] * 4


async def test_masked_sequences_enter_no_statistic() -> None:
    masked = TrajectoryGroup.build(
        env="e",
        instance_id="0",
        sequences=[[1, 2]] * 3,
        loss_mask=[[0, 1], [0, 1], [0, 0]],
        rewards=[1, 0, 99],
        reward_parts={"right": [1, 0, 99]},
    )
    without = of_parts(right=[1, 0])

    assert await advantages([masked], {"right": 1.0}) == await advantages([without], {"right": 1.0})
