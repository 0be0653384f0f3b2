"""Trajectories become SkyRL's columns: rows in the order asked for, no empty response, nothing lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.skyrl.contract import OUTPUT
from tests.stages.turns import of_turns

from penstock import StopReason, TrajectoryGroup
from penstock._stages.integrations.skyrl.requests import PromptRequest, SampledRepetition
from penstock._stages.integrations.skyrl.samples import Asked, Rules, columns_of, metrics_of
from penstock.errors import InvalidPipeline, InvalidRecord

FILLER = 9


def request(group: TrajectoryGroup | None, prompt: list[int], repetitions: int = 1, **parts: float) -> PromptRequest:
    """Return a request whose first repetitions are answered by `group`, and whose others were given up."""
    asked = PromptRequest("17", np.array(prompt, np.int32), tuple(range(repetitions)))
    asked.rows |= dict.fromkeys(range(repetitions))
    asked.rows |= {row.id.repetition_id: SampledRepetition(row, parts) for row in group or ()}
    return asked


def columns(group: TrajectoryGroup | None, prompt: list[int], repetitions: int = 1, **rules: Any) -> dict[str, Any]:
    asked = request(group, prompt, repetitions)
    return columns_of([Asked(asked, each) for each in asked.rows], Rules(**rules), FILLER)


def test_the_output_has_every_key_of_skyrl_and_what_penstock_has_not_is_none() -> None:
    found = columns(of_turns(".x", behavior_logprobs=[[0, -1]]), [1])

    assert found.keys() == OUTPUT
    assert {name for name, value in found.items() if value is None} == {
        *("rollout_metrics", "trajectory_ids", "trajectory_generation_times", "trajectory_time_splits"),
        *("rollout_expert_indices", "rollout_sample_support", "is_last_step", "pixel_values", "image_grid_thw"),
    }


def test_rows_are_in_the_order_in_which_they_were_asked_for() -> None:
    first, second = (
        request(of_turns(".x", ".xx", rewards=[reward, reward + 1], behavior_logprobs=np.zeros(5)), [1], 2)
        for reward in (0.0, 10.0)
    )

    found = columns_of([Asked(second, 1), Asked(first, 0), Asked(second, 0), Asked(first, 1)], Rules(), FILLER)

    assert found["rewards"] == [11, 0, 10, 1]
    assert found["response_ids"] == [[1, 1], [1], [1], [1, 1]]


def test_what_the_environment_said_between_turns_is_masked_and_keeps_its_place() -> None:
    group = of_turns("..x.x", behavior_logprobs=[[0, 0, -1, 0, -2]], stop_reasons=[StopReason.LENGTH])

    found = columns(group, [1, 1])

    assert found["prompt_token_ids"] == [[1, 1]]
    assert found["response_ids"] == [[1, 1, 1]]
    assert found["loss_masks"] == [[1, 0, 1]]
    assert found["rollout_logprobs"] == [[-1, 0, -2]]
    assert found["stop_reasons"] == ["length"]


def test_a_response_begins_behind_skyrls_prompt_even_where_its_first_tokens_do_not_train() -> None:
    found = columns(of_turns("...x", behavior_logprobs=np.zeros(4)), [1, 1])

    assert (found["prompt_token_ids"], found["loss_masks"]) == ([[1, 1]], [[0, 1]])


def test_a_response_is_never_empty() -> None:
    masked_by_a_stage = columns(of_turns("....", behavior_logprobs=np.zeros(4)), [2, 2])
    given_up = columns(None, [1, 1])

    assert masked_by_a_stage["response_ids"] == [[1]]
    assert masked_by_a_stage["loss_masks"] == [[0]]
    assert given_up["prompt_token_ids"] == [[1, 1]]
    assert given_up["response_ids"] == [[FILLER]]


def test_a_repetition_that_was_given_up_does_not_train_and_leaves_the_mean_of_its_prompt_as_it_is() -> None:
    group = of_turns(".x", ".x", rewards=[1.0, 0.5], behavior_logprobs=np.zeros(4))

    found = columns(group, [1], repetitions=3)

    assert found["rewards"] == [1.0, 0.5, 0.75]
    assert found["loss_masks"] == [[1], [1], [0]]
    assert found["rollout_logprobs"][2] == [0.0]
    assert found["stop_reasons"] == ["stop", "stop", "error"]


def test_rewards_of_tokens_are_sent_as_such_and_not_mixed_with_others() -> None:
    scored = of_turns(".x.x", token_rewards=[[0, 1, 0, 2]], behavior_logprobs=np.zeros(4))
    plain = request(of_turns(".x", behavior_logprobs=np.zeros(2)), [1])

    assert columns(scored, [1], repetitions=2)["rewards"] == [[1, 0, 2], [0.0]]
    with pytest.raises(InvalidRecord, match="in all groups, or in none"):
        columns_of([Asked(request(scored, [1]), 0), Asked(plain, 0)], Rules(), FILLER)


def test_the_filters_of_skyrls_generator_are_applied_to_what_was_cut() -> None:
    cut, whole = StopReason.LENGTH, StopReason.STOP
    group = of_turns(".x", ".x", rewards=[1, 1], stop_reasons=[cut, whole], behavior_logprobs=np.zeros(4))

    found = columns(group, [1], repetitions=2, zero_reward_on_non_stop=True, apply_overlong_filtering=True)

    assert (found["rewards"], found["loss_masks"]) == ([0, 1], [[0], [1]])


def test_log_probabilities_are_sent_where_skyrl_wants_them_and_missing_ones_are_refused() -> None:
    without = of_turns(".x")

    assert columns(without, [1], logprobs=False)["rollout_logprobs"] is None
    with pytest.raises(InvalidPipeline, match="expected groups with log-probabilities"):
        columns(without, [1])


def test_the_parts_of_a_reward_are_the_metrics_of_the_environment() -> None:
    asked = request(of_turns(".x", behavior_logprobs=np.zeros(2)), [1], score=0.5)

    assert columns_of([Asked(asked, 0)], Rules(), FILLER)["env_metrics"] == [{"score": 0.5}]


def test_the_lag_of_a_row_is_that_of_its_oldest_token() -> None:
    asked = request(of_turns(".xx", behavior_logprobs=np.zeros(3), policy_versions=[3, 3, 4]), [1], repetitions=2)

    assert metrics_of([Asked(asked, 0), Asked(asked, 1)], version=5) == {
        "generate/lag_mean": 2,
        "generate/lag_max": 2,
        "generate/resampled": 0,
        "generate/given_up": 1,
    }
