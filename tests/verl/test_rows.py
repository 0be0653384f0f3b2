"""Groups become rows of verl's TransferQueue: every column in its place, and what is missing is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.verl.contract import FIELDS, TAG

from penstock import TrajectoryGroup, TrajectoryId
from penstock._stages.integrations.verl.rows import Needs, rows_of
from penstock.errors import InvalidPipeline, InvalidRecord

MASK = [0, 0, 1, 1, 0, 0, 1, 1]


def of_two(**columns: Any) -> TrajectoryGroup:
    """Return a group of a sequence of two turns, with an observation between them, and one of a single turn."""
    given: dict[str, Any] = {
        "loss_mask": [MASK, [0, 0, 1]],
        "behavior_logprobs": [[0, 0, -0.5, -1.5, 0, 0, -0.25, -1.0], [0, 0, -2.0]],
        "policy_versions": [4, 3],
        "reward_parts": {"format": [0.5, 0.0]},
    }
    return TrajectoryGroup.build(
        env="sums",
        instance_id="7",
        sequences=[[5, 6, 7, 8, 9, 10, 11, 12], [5, 6, 9]],
        rewards=[1.0, 0.25],
        **given | columns,
    )


def test_every_column_is_where_verl_expects_it() -> None:
    first, second = rows_of(of_two(), Needs())

    assert [first.trajectory, second.trajectory] == [TrajectoryId("sums", "7", 0), TrajectoryId("sums", "7", 1)]
    assert {name: column.tolist() for name, column in first.columns.items()} == {
        "prompts": [5, 6],
        "responses": [7, 8, 9, 10, 11, 12],
        "response_mask": MASK[2:],
        "loss_mask": MASK[2:],
        "input_ids": [5, 6, 7, 8, 9, 10, 11, 12],
        "position_ids": list(range(8)),
        "rm_scores": [0, 0, 0, 0, 0, 1.0],
        "rollout_log_probs": [-0.5, -1.5, 0, 0, -0.25, -1.0],
    }
    assert (first.values["num_turns"], second.values["num_turns"]) == (4, 2)
    assert first.values["extra_fields"]["trajectory"] == ["sums", "7", 0]
    assert first.values["extra_fields"]["reward_extra_info"] == {"format": 0.5}
    assert first.tag | {"global_steps": 5} == TAG
    assert (second.tag["prompt_len"], second.tag["response_len"], second.tag["min_global_steps"]) == (2, 1, 3)


def test_fields_and_dtypes_are_those_that_were_recorded_of_verl() -> None:
    row, _ = rows_of(of_two(), Needs())

    made = {name: str(column.dtype) for name, column in row.columns.items()}
    made |= {name: type(value).__name__ for name, value in row.values.items()}
    written = {"global_steps": "int", "session_id": "int", "uid": "str"}
    assert made | written == {name: kind.partition(" ")[0] for name, kind in FIELDS.items()}


def test_the_versions_of_tokens_become_the_span_of_their_row() -> None:
    row, _ = rows_of(of_two(policy_versions=[3, 3, 3, 3, 3, 5, 6, 6, 4, 4, 4]), Needs())

    assert (row.tag["min_global_steps"], row.tag["max_global_steps"]) == (3, 6)
    assert row.values["extra_fields"]["min_global_steps"] == 3


def test_scores_of_tokens_stay_on_them_and_add_up_to_the_reward() -> None:
    row, _ = rows_of(of_two(token_rewards=[[0, 0, 0, 0.25, 0, 0, 0, 0.25], [0, 0, 0.25]]), Needs())

    assert row.columns["rm_scores"].tolist() == [0, 0.25, 0, 0, 0, 0.75]


def test_advantages_go_with_the_rows_only_where_verl_takes_them() -> None:
    advantages = [[0, 0, 1.0, 0.5, 0, 0, -1.0, 2.0], [0, 0, -1.0]]
    group = of_two(advantages=advantages)

    assert "advantages" not in rows_of(group, Needs())[0].columns
    assert rows_of(group, Needs(advantages=True))[0].columns["advantages"].tolist() == advantages[0][2:]
    with pytest.raises(InvalidPipeline, match="adv_estimator=penstock, got none"):
        rows_of(of_two(), Needs(advantages=True))


def test_a_row_shares_no_memory_with_its_group() -> None:
    group = of_two(advantages=np.zeros(11))

    for row in rows_of(group, Needs(advantages=True)):
        for column in row.columns.values():
            assert column.flags.writeable  # torch warns of others
            assert not any(np.shares_memory(column, of_group) for of_group in group.columns().values())


def test_a_sequence_in_which_nothing_trains_has_no_row() -> None:
    (row,) = rows_of(of_two(loss_mask=[[0] * 8, [0, 0, 1]]), Needs())

    assert row.trajectory.repetition_id == 1


def test_a_group_without_log_probabilities_is_refused_where_verl_reads_them() -> None:
    group = of_two(behavior_logprobs=None)

    with pytest.raises(InvalidPipeline, match="calculate_log_probs=False"):
        rows_of(group, Needs())
    assert "rollout_log_probs" not in rows_of(group, Needs(logprobs=False))[0].columns


def test_a_group_of_another_temperature_is_refused() -> None:
    with pytest.raises(InvalidRecord, match=r"of verl's configuration, 1\.0, got 0\.5"):
        rows_of(of_two(meta={"temperature": 0.5}), Needs(temperature=1.0))
