"""A preset gives the numbers of its library, on ragged groups of many turns, of one and of masked sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.stages.modes import GATHERING, LIBRARIES, MODES_OF_LIBRARIES, of_score
from tests.stages.trainer_libraries import FORMULAS, GAMMA, LAMBDA, Row

from penstock import AdvantageNormalizer, TrajectoryGroup
from penstock.testing import drive

PROMPT = 2
SIZES = (1, 5, 3, 4)
ENDS_WITH_AN_ANSWER, MASKED = 0.3, 0.15


def of_many_turns(random: np.random.Generator, instance_id: str, size: int) -> TrajectoryGroup:
    """Return sequences with answers of an environment inside or at the end, and some that are masked entirely."""
    masks = []
    for length in random.integers(1, 12, size):
        mask = np.ones(length, np.bool_)
        mask[2:4] = length <= 4  # short ones have one turn
        mask[6:7] = False
        mask[-1] &= length == 1 or random.random() > ENDS_WITH_AN_ANSWER
        masks.append(np.zeros_like(mask) if random.random() < MASKED else mask)
    token_rewards = [[0.0] * PROMPT + (random.integers(-8, 8, len(mask)) / 8).tolist() for mask in masks]
    return TrajectoryGroup.build(
        env="test",
        instance_id=instance_id,
        sequences=[[1] * (PROMPT + len(mask)) for mask in masks],
        loss_mask=[[False] * PROMPT + mask.tolist() for mask in masks],
        rewards=random.integers(0, 3, size) / 2,
        token_rewards=token_rewards,
        values=random.standard_normal(sum(map(len, token_rewards))),
    )


def rows_of(groups: list[TrajectoryGroup], level: Any) -> list[Row]:
    rows = []
    for number, group in enumerate(groups):
        for row in group:
            assert row.token_rewards is not None
            assert row.values is not None
            rewards = row.token_rewards.astype(float) * (level != "sequence")
            rewards[-1] += row.reward * (level != "token")
            values = row.values[PROMPT:].tolist()
            rows.append(Row(number, row.loss_mask[PROMPT:].astype(int).tolist(), rewards[PROMPT:].tolist(), values))
    return rows


def stage(library: Any, mode: Any, level: Any = "sequence") -> AdvantageNormalizer:
    by_token = mode in ("reinforce++", "gae")
    whitens = mode in GATHERING or (mode, library) in (
        ("gae", "verl"),
        ("gae", "skyrl"),
    )
    return AdvantageNormalizer(
        mode,
        batch_groups=len(SIZES) if whitens else None,
        rewards=level,
        gamma=GAMMA if by_token else 1.0,
        gae_lambda=LAMBDA if mode == "gae" else 1.0,
        preset=library,
        components=of_score(mode),
    )


def test_every_mode_of_every_preset_is_compared() -> None:
    assert set(FORMULAS) == set(MODES_OF_LIBRARIES)
    assert {library for library, _ in FORMULAS} == set(LIBRARIES)


OF_SEQUENCES = [(*key, "sequence") for key in FORMULAS]
OF_TOKENS = [(*key, level) for key in FORMULAS for level in ("token", "both") if key[1] != "gdpo"]


@pytest.mark.parametrize(("library", "mode", "level"), [*OF_SEQUENCES, *OF_TOKENS])
async def test_a_preset_gives_the_numbers_of_its_library(library: Any, mode: Any, level: Any) -> None:
    random = np.random.default_rng(7)
    groups = [of_many_turns(random, str(number), size) for number, size in enumerate(SIZES)]
    groups[2] = groups[2].with_rewards([0.5] * SIZES[2])
    expected = FORMULAS[library, mode](rows_of(groups, level))

    out = await drive(stage(library, mode, level), groups)

    found = [row.advantages[PROMPT:].tolist() for group in out for row in group if row.advantages is not None]
    for row, library_row in zip(found, expected, strict=True):
        assert row == pytest.approx(library_row, rel=1e-6, abs=1e-6)


async def test_roll_gives_a_tool_token_the_value_of_its_critic_and_no_reward() -> None:
    """δ of the tool token is 0.5 · V(last) − V(tool), which reaches the turn before it by γλ."""
    turns = TrajectoryGroup.build(
        env="e",
        instance_id="0",
        sequences=[[1] * 4],
        loss_mask=[[0, 1, 0, 1]],
        rewards=[8],
        token_rewards=[[0, 0, 64, 0]],
        values=[[32, 1, 2, 4]],
    )
    stage = AdvantageNormalizer("gae", rewards="both", gamma=0.5, gae_lambda=0.5, preset="roll")

    (out,) = await drive(stage, [turns])

    last = 8 - 4
    tool = 0 + 0.5 * 4 - 2 + 0.25 * last
    assert out.advantages is not None
    assert out.advantages.tolist() == [0, 0 + 0.5 * 2 - 1 + 0.25 * tool, 0, last]


LONE = 0.75


@pytest.mark.parametrize(
    ("library", "mode", "expected"),
    [
        ("verl", "grpo", LONE / (1 + 1e-6)),
        ("verl", "rloo", LONE),
        ("skyrl", "grpo", LONE / (1 + 1e-6)),
        ("skyrl", "rloo", 0),
        ("trl", "grpo", 0),
        ("trl", "rloo", 0),
        ("roll", "grpo", 0),
    ],
)
async def test_a_group_of_one_gets_the_advantage_of_its_library(library: Any, mode: Any, expected: float) -> None:
    one = TrajectoryGroup.build(env="e", instance_id="0", sequences=[[1, 2]], loss_mask=[[0, 1]], rewards=[LONE])

    (out,) = await drive(stage(library, mode), [one])

    assert out.advantages is not None
    assert out.advantages[1] == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(("library", "mode"), [key for key in FORMULAS if key[1] != "gae"])
async def test_rounding_of_float32_sums_adds_nothing_to_equal_rewards(library: Any, mode: Any) -> None:
    seven = TrajectoryGroup.build(
        env="e", instance_id="0", sequences=[[1, 2]] * 7, loss_mask=[[0, 1]] * 7, rewards=[1 / 3] * 7
    )

    (out,) = await drive(stage(library, mode), [seven])

    assert out.advantages is not None
    assert not out.advantages.any()


@pytest.mark.parametrize(
    ("library", "mode"),
    [("verl", "reinforce++"), ("verl", "gae"), ("skyrl", "reinforce++"), ("skyrl", "gae"), ("roll", "reinforce++")],
)
@pytest.mark.parametrize("mask", [[0, 0, 1], [0, 0, 0]])
async def test_where_a_library_has_too_little_to_whiten_a_preset_gives_zero(
    library: Any, mode: Any, mask: list[int]
) -> None:
    one = TrajectoryGroup.build(
        env="e", instance_id="0", sequences=[[1, 2, 3]], loss_mask=[mask], rewards=[1], values=[[0, 0, 0.5]]
    )

    (out,) = await drive(stage(library, mode), [one])

    assert out.advantages is not None
    assert not out.advantages.any()


@pytest.mark.parametrize(("library", "nonzero"), [("verl", True), ("skyrl", True), ("trl", True), ("roll", False)])
async def test_a_negligible_deviation_gives_zero_where_the_library_does(
    library: Any,
    nonzero: bool,  # noqa: FBT001 (a case)
) -> None:
    near = TrajectoryGroup.build(
        env="e", instance_id="0", sequences=[[1, 2]] * 2, loss_mask=[[0, 1]] * 2, rewards=[0, 1e-6]
    )

    (out,) = await drive(stage(library, "grpo"), [near])

    assert out.advantages is not None
    assert bool(out.advantages.any()) == nonzero


@pytest.mark.parametrize(
    ("library", "expected"),
    [("verl", 0.5 / (0.5**0.5 + 1e-6)), ("skyrl", 0.5 / (0.5**0.5 + 1e-6)), ("trl", 0.5 / (0.5**0.5 + 1e-4))],
)
async def test_epsilon_is_that_of_the_library(library: Any, expected: float) -> None:
    two = TrajectoryGroup.build(
        env="e", instance_id="0", sequences=[[1, 2]] * 2, loss_mask=[[0, 1]] * 2, rewards=[0, 1]
    )

    (out,) = await drive(stage(library, "grpo"), [two])

    assert out.advantages is not None
    assert out.advantages[3] == pytest.approx(expected, abs=1e-7)
