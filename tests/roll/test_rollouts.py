"""Rows of a group become the rollouts that ROLL's own env manager makes, column by column."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.roll.contract import CONTRACT, group_of

from penstock import TrajectoryGroup
from penstock._stages.integrations.roll.rollouts import (
    EnvNames,
    columns_of,
    fits,
    metrics_of,
    names_of,
    oldest_version,
)

NAMES = EnvNames(tag="sums", group_id=1, group_seed=40)
EPISODE = 3


def group(lengths: list[int], *, trains: bool = True, **columns: Any) -> TrajectoryGroup:
    return TrajectoryGroup.build(
        env="sums",
        instance_id="0",
        sequences=[np.arange(length) for length in lengths],
        loss_mask=[[0] * (length - 1) + [int(trains)] for length in lengths],
        rewards=[1.0] * len(lengths),
        **columns,
    )


@pytest.mark.parametrize("recorded", CONTRACT["rollouts"], ids=lambda recorded: recorded["name"])
def test_a_rollout_is_that_of_rolls_env_manager(recorded: dict[str, Any]) -> None:
    (row,) = group_of(recorded["turns"])
    expected = recorded["formulated"]

    columns = columns_of(row, CONTRACT["length"], CONTRACT["pad"])
    names = names_of(row, NAMES, EPISODE, env_id=6)

    assert columns.keys() == expected["tensors"].keys()
    for name, tensor in expected["tensors"].items():
        assert f"torch.{columns[name].dtype}" == tensor["dtype"], name
        assert columns[name].tolist() == tensor["values"][0], name
    assert {name: [value] for name, value in names.items() if not name.startswith("traj")} == expected["values"]
    assert metrics_of(row, "sums", {}) == expected["metrics"]


def test_rollouts_of_a_prompt_have_one_group_name_and_names_of_their_own() -> None:
    rows = list(group([3, 3]))

    found = [names_of(row, NAMES, EPISODE, env_id) for row, env_id in zip(rows, (2, 3), strict=True)]

    assert {names["traj_group_id"] for names in found} == {"sums_1_3_40"}  # <tag>_<group>_<episode>_<seed>
    assert [names["traj_id"] for names in found] == ["sums_1_3_40_2", "sums_1_3_40_3"]


def test_tokens_of_the_environment_between_turns_do_not_train() -> None:
    turns = next(each["turns"] for each in CONTRACT["rollouts"] if each["name"] == "three turns")
    (row,) = group_of(turns)

    columns = columns_of(row, CONTRACT["length"], CONTRACT["pad"])

    assert columns["response_mask"].tolist() == [bool(mask) for mask in [0, 0, 1, 0, 0, 1, 1, 0, 1, 0, 0, 0]]
    assert columns["prompt_mask"].sum() == 2


def test_a_reward_that_was_shaped_is_the_score_and_its_parts_are_metrics() -> None:
    shaped = group([3], token_rewards=[[0.0, 0.0, 0.25]])
    (row,) = shaped

    names = names_of(row, NAMES, EPISODE, env_id=0)

    assert names["episode_scores"] == sum(names["step_scores"]) == 1.0
    assert metrics_of(row, "sums", {"score": 0.5})["env/sums/rewards/score"] == 0.5


@pytest.mark.parametrize(
    "unfit",
    [group([3]), group([3, 3, 3]), group([3, 9]), group([3, 3], trains=False)],
    ids=["too few", "too many", "too long", "nothing trains"],
)
def test_groups_that_roll_cannot_train_do_not_fit(unfit: TrajectoryGroup) -> None:
    assert fits(group([3, 8]), group_size=2, length=8)
    assert not fits(unfit, group_size=2, length=8)


def test_the_version_of_a_group_is_that_of_its_oldest_token() -> None:
    assert oldest_version(group([3, 3], policy_versions=[5, 4])) == 4
    assert oldest_version(group([3, 3], policy_versions=[5, 5, 5, 5, 5, 2])) == 2
