"""Groups become samples of TRL: every column in its place, and what TRL cannot express is refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.trl.contract import SAMPLE

from penstock import TrajectoryGroup, TrajectoryId
from penstock._stages.integrations.flow_thread.flow_run import Drop
from penstock._stages.integrations.trl.samples import FIELDS, SampleBounds, samples_of
from penstock.errors import InvalidPipeline, InvalidRecord
from penstock.testing import group


def of_two(**columns: Any) -> TrajectoryGroup:
    """Return a group of a sequence of two turns, with an observation between them, and one of a single turn."""
    given: dict[str, Any] = {
        "loss_mask": [[0, 1, 0, 1], [0, 0, 1]],
        "behavior_logprobs": [[0, -0.5, 0, -1.5], [0, 0, -2.0]],
        "advantages": [[0, 1.0, 0, 1.0], [0, 0, -1.0]],
        "policy_versions": [3, 4],
        "reward_parts": {"format": [0.5, 0.0]},
    }
    return TrajectoryGroup.build(
        env="sums", instance_id="7", sequences=[[5, 6, 7, 8], [5, 6, 9]], rewards=[1.0, 0.0], **given | columns
    )


def test_the_fields_are_those_that_were_recorded_of_trl() -> None:
    assert list(FIELDS) == list(SAMPLE)


def test_every_column_is_where_trl_expects_it() -> None:
    (first, sample), (second, other) = samples_of(of_two(), 11)

    assert [first, second] == [TrajectoryId("sums", "7", 0), TrajectoryId("sums", "7", 1)]
    assert set(sample) | {"enqueued_at"} == set(SAMPLE)
    assert sample["input_ids"].tolist() == [5, 6, 7, 8]
    assert sample["completion_mask"].tolist() == [0, 1, 0, 1]
    assert sample["old_log_probs"].tolist() == [0, -0.5, 0, -1.5]
    assert [sample[name].dtype for name in ("input_ids", "completion_mask", "old_log_probs")] == [
        np.int64,
        np.int64,
        np.float32,
    ]
    assert (sample["advantage"], other["advantage"]) == (1.0, -1.0)
    assert (sample["model_version"], other["model_version"]) == (3, 4)
    assert (sample["group_id"], other["group_id"]) == (11, 11)
    assert sample["metrics"] == {"reward": 1.0, "reward_std": 0.5, "rewards/format": 0.5}
    assert other["metrics"] == {"reward": 0.0, "reward_std": 0.5, "rewards/format": 0.0}


def test_a_sample_shares_no_memory_with_its_group() -> None:
    group = of_two()

    for _, sample in samples_of(group, 0):
        for name, column in (("input_ids", group.tokens), ("old_log_probs", group.behavior_logprobs)):
            assert column is not None
            assert not np.shares_memory(sample[name], column)


def test_the_version_of_a_sequence_is_that_of_its_oldest_token() -> None:
    samples = samples_of(of_two(policy_versions=[3, 3, 4, 5, 6, 6, 7]), 0)

    assert [sample["model_version"] for _, sample in samples] == [3, 6]


def test_a_sequence_without_a_token_that_trains_is_no_sample() -> None:
    samples = list(samples_of(of_two(loss_mask=[[0, 1, 0, 1], [0, 0, 0]]), 0))

    assert [trajectory.repetition_id for trajectory, _ in samples] == [0]


def test_messages_are_decoded_where_the_tokenizer_is_known() -> None:
    _, (_, sample) = samples_of(of_two(), 0, decode=lambda tokens: "".join(map(str, tokens)))

    assert sample["prompt"] == [{"role": "user", "content": "56"}]
    assert sample["completion"] == [{"role": "assistant", "content": "9"}]


def test_a_group_without_advantages_names_the_stage_that_makes_them() -> None:
    with pytest.raises(InvalidPipeline, match=r"add \.then\(AdvantageNormalizer"):
        list(samples_of(of_two(advantages=None), 0))


def test_a_rollout_with_branches_is_refused() -> None:
    with pytest.raises(InvalidRecord, match=r"one sequence for each rollout, because TRL .*, got 2 sequences of 1"):
        list(samples_of(group(completion_lengths=[2, 2], rollout_ids=[0, 0], advantages=[0] * 8), 0))


def test_a_group_without_log_probabilities_is_refused() -> None:
    with pytest.raises(InvalidPipeline, match="expected groups with log-probabilities"):
        list(samples_of(of_two(behavior_logprobs=None), 0))


def test_advantages_that_differ_within_a_sequence_are_refused_and_not_averaged() -> None:
    with pytest.raises(InvalidRecord, match="one advantage for all tokens of a sequence"):
        list(samples_of(of_two(advantages=[[0, 1.0, 0, 0.5], [0, 0, -1.0]]), 0))


def test_a_temperature_other_than_that_of_the_trainer_is_refused() -> None:
    cold = of_two(meta={"temperature": 0.5})

    assert len(list(samples_of(cold, 0, temperature=0.5))) == 2
    with pytest.raises(InvalidRecord, match=r"TRL's configuration, 1\.0, got 0\.5"):
        list(samples_of(cold, 0, temperature=1.0))
    for turns, found in (([[[2, 1.0], [2, 0.5]], None], r"0\.5, 1\.0"), (["hot"], "values in an unknown form")):
        with pytest.raises(InvalidRecord, match=f"got {found}"):
            list(samples_of(of_two(meta={"temperatures": turns}), 0, temperature=1.0))
    assert len(list(samples_of(of_two(meta={"temperatures": [[[4, 1.0]], None]}), 0, temperature=1.0))) == 2


@dataclass
class Sample:
    model_version: int = 1
    input_ids: NDArray[np.int64] = field(default_factory=lambda: np.zeros(3, np.int64))


def test_a_sample_is_dropped_when_it_lags_more_versions_than_trl_allows() -> None:
    limits = SampleBounds(max_staleness=2)

    assert limits.drop(Sample(model_version=1), 3) is None
    assert limits.drop(Sample(model_version=1), 4) == Drop("stale", "dropped by TRL: older than max_staleness=2")


def test_a_sample_is_dropped_when_it_is_longer_than_a_row() -> None:
    assert SampleBounds(4, token_budget=3).drop(Sample(), 1) is None
    assert SampleBounds(4, token_budget=0).drop(Sample(), 1) is None
    assert SampleBounds(4, token_budget=2).drop(Sample(), 1) == Drop(
        "rejected", "dropped by TRL: longer than token_budget=2"
    )
