"""Rows are padded as verl pads them: prompts at the left, responses at the right, and nothing is cut."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock import TrajectoryGroup
from penstock._stages.integrations.verl.data_proto import Shape, padded, unpadded
from penstock._stages.integrations.verl.rows import Needs, Row, rows_of

SHAPE = Shape(prompt_length=3, response_length=4, pad_token_id=9)


def rows(**columns: Any) -> list[Row]:
    group = TrajectoryGroup.build(
        env="sums",
        instance_id="7",
        sequences=[[5, 6, 7, 8, 0], [5, 1]],
        loss_mask=[[0, 0, 1, 0, 1], [0, 1]],
        rewards=[1.0, 0.5],
        behavior_logprobs=[[0, 0, -0.5, 0, -1.0], [0, -2.0]],
        reward_parts={"exact": [1.0, 0.0]},
        **columns,
    )
    return rows_of(group, Needs(advantages=group.advantages is not None))


def test_every_column_is_where_verl_expects_it() -> None:
    assert {name: column.tolist() for name, column in padded(rows(), SHAPE).items()} == {
        "prompts": [[9, 5, 6], [9, 9, 5]],
        "responses": [[7, 8, 0, 9], [1, 9, 9, 9]],
        "response_mask": [[1, 0, 1, 0], [1, 0, 0, 0]],
        "rm_scores": [[0, 0, 1.0, 0], [0.5, 0, 0, 0]],
        "rollout_log_probs": [[-0.5, 0, -1.0, 0], [-2.0, 0, 0, 0]],
        "input_ids": [[9, 5, 6, 7, 8, 0, 9], [9, 9, 5, 1, 9, 9, 9]],
        "attention_mask": [[0, 1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 0, 0, 0]],
        "position_ids": [[0, 0, 1, 2, 3, 4, 4], [0, 0, 0, 1, 1, 1, 1]],
    }


def test_advantages_of_tokens_are_kept() -> None:
    columns = padded(rows(advantages=[[0, 0, 1.0, 0, -2.0], [0, 0.5]]), SHAPE)

    assert columns["advantages"].tolist() == columns["returns"].tolist() == [[1.0, 0, -2.0, 0], [0.5, 0, 0, 0]]


def test_the_group_and_the_trajectory_of_a_row_are_beside_the_tensors() -> None:
    columns = unpadded(rows())

    assert columns["uid"].tolist() == ["sums/7", "sums/7"]
    assert columns["trajectory"].tolist() == [["sums", "7", 0], ["sums", "7", 1]]
    assert columns["__num_turns__"].tolist() == [4, 2]
    assert columns["__num_turns__"].dtype == np.int32
    assert columns["exact"].tolist() == [1.0, 0.0]


def test_a_row_fits_up_to_both_lengths() -> None:
    first, second = rows()

    assert [Shape(2, 3).fits(row) for row in (first, second)] == [True, True]
    assert [Shape(1, 3).fits(row) for row in (first, second)] == [False, True]
    assert [Shape(2, 2).fits(row) for row in (first, second)] == [False, True]
