"""Groups become the rollouts of TRL's synchronous trainer, and what it cannot take is not given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.stages.turns import of_turns

from penstock import SourceEnv, source
from penstock._stages.integrations.trl.rollout_func import columns_of, groups_of
from penstock.errors import InvalidPipeline, InvalidRecord
from penstock.integrations.trl import flow_reward, rollout_func
from penstock.policies import NoOpPolicy
from penstock.weights import WeightPublisher


def test_a_completion_begins_at_the_first_sampled_token_and_masks_what_the_environment_said() -> None:
    group = of_turns("..x.x", ".x", rewards=[1.0, 0.5], behavior_logprobs=[[0, 0, -1, 0, -2], [0, -3]])

    assert columns_of([group]) == {
        "prompt_ids": [[1, 1], [1]],
        "completion_ids": [[1, 1, 1], [1]],
        "logprobs": [[-1, 0, -2], [-3]],
        "env_mask": [[1, 0, 1], [1]],
        "reward": [1.0, 0.5],
    }


def test_rewards_of_the_flow_are_passed_on() -> None:
    assert flow_reward(reward=[1.0, 0.5], prompts=["a", "b"], completions=["c", "d"]) == [1.0, 0.5]


def test_a_group_of_another_size_or_with_a_sequence_that_does_not_train_is_not_given() -> None:
    whole, masked = (of_turns(".x", second, behavior_logprobs=np.zeros(4)) for second in (".x", ".."))

    ((ids, given),) = groups_of(2, 1.0, whole, None)
    assert ids == tuple(whole.ids)
    assert not np.shares_memory(given.tokens, whole.tokens)
    assert list(groups_of(3, 1.0, whole, None)) == []
    assert list(groups_of(2, 1.0, masked, None)) == []


def test_a_group_without_log_probabilities_or_at_another_temperature_is_refused() -> None:
    with pytest.raises(InvalidPipeline, match="expected groups with log-probabilities"):
        list(groups_of(1, 1.0, of_turns(".x"), None))
    with pytest.raises(InvalidRecord, match=r"1\.0, got 0\.5"):
        list(groups_of(1, 1.0, of_turns(".x", behavior_logprobs=[[0, -1]], meta={"temperature": 0.5}), None))


def unused() -> Any:
    raise AssertionError("expected no environment to be made")


def test_a_trainer_without_the_callback_or_with_several_processes_is_refused() -> None:
    flow = source(SourceEnv(unused, NoOpPolicy()))
    trainer = SimpleNamespace(accelerator=SimpleNamespace(num_processes=2), model=SimpleNamespace(training=True))

    with rollout_func(flow, WeightPublisher({"bias": np.zeros(1, np.float32)})) as rollouts:
        with pytest.raises(InvalidPipeline, match=r"callbacks=\[rollouts\.callback\(\)\]"):
            rollouts(["a"], trainer)
        rollouts.train_begins(None, None, None)
        with pytest.raises(InvalidPipeline, match="got 2 processes"):
            rollouts(["a"], trainer)

    assert rollouts.report is None
