from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.stages.turns import of_turns

from penstock import StopReason, TrainBatch, TrajectoryGroup
from penstock._stages.integrations.atropos.contract import ScoredData, Untrainable, decode_scored
from penstock._stages.integrations.atropos.translation import from_group, scored_of, to_group
from penstock.errors import InvalidRecord
from penstock.testing import group


@st.composite
def groups(draw: st.DrawFn) -> ScoredData:
    """Draw any group of the contract, as it is sent: 1.0 and −100 where nothing trains, a teacher's likeliest first."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tokens = [random.integers(0, 2**31, length) for length in lengths]
    trains = [(random.random(length) < 0.5) & (np.arange(length) > 0) for length in lengths]
    counts = [random.integers(0, 4, length).tolist() for length in lengths]
    named = draw(
        st.dictionaries(st.text(max_size=3), st.integers(-(2**63), 2**63) | st.text(max_size=3), min_size=1, max_size=2)
    )

    def floats(*, most: float = 1e6) -> list[list[float]]:
        return [random.uniform(-1e6, most, length).astype(np.float32).tolist() for length in lengths]

    def sampled() -> list[list[float]]:
        logprobs = zip(floats(most=0), trains, strict=True)
        return [np.where(trained, row, 1.0).tolist() for row, trained in logprobs]

    everything: dict[str, Any] = {
        "advantages": floats(),
        "ref_logprobs": floats(),
        "inference_logprobs": sampled(),
        "messages": [[named | {"role": "user", "content": None}] * turns for turns in range(len(lengths))],
        "generation_params": named,
        "overrides": [named] + [{}] * (len(lengths) - 1),
        "group_overrides": named,
        "images": ["by reference"],
        "env_id": 7,
    }
    taught: dict[str, Any] = {
        "distill_token_ids": [[random.permutation(9)[:count].tolist() for count in row] for row in counts],
        "distill_logprobs": [
            [np.sort(-random.random(count, np.float32))[::-1].tolist() for count in row] for row in counts
        ],
    }
    present = draw(st.sets(st.sampled_from(sorted(everything))))
    return ScoredData(
        tokens=[row.tolist() for row in tokens],
        masks=[np.where(*row, -100).tolist() for row in zip(trains, tokens, strict=True)],
        scores=random.standard_normal(len(lengths)).astype(np.float32).tolist(),
        **{name: everything[name] for name in present},
        **(taught if draw(st.booleans()) else {}),
    )


def grouped(scored: ScoredData | None = None, **fields: Any) -> TrajectoryGroup:
    needed: dict[str, Any] = {"tokens": [[5, 6, 7], [5, 8]], "masks": [[-100, 6, 7], [-100, 8]], "scores": [1.0, 0.0]}
    scored = scored or ScoredData(**(needed | fields))
    return to_group(scored, env="math", instance_id="0", policy_version=3)


@given(groups())
@settings(max_examples=50)
def test_every_field_comes_back(scored: ScoredData) -> None:
    assert scored_of(grouped(scored)) == scored
    assert decode_scored(from_group(grouped(scored))) == decode_scored(scored.json())


def test_a_rollout_with_branches_is_refused() -> None:
    with pytest.raises(
        InvalidRecord, match=r"expected one sequence for each rollout, .*, got 2 sequences of 1 rollouts"
    ):
        from_group(group(rollout_ids=[0, 0]))


def test_tokens_masked_with_minus_100_do_not_train_and_have_no_logprob() -> None:
    group = grouped(inference_logprobs=[[1.0, -0.5, -0.25], [1.0, -2.0]], advantages=[[1, 2, 3], [4, 5]])

    assert group.offsets.tolist() == [0, 3, 5]
    assert group.loss_mask.tolist() == [False, True, True, False, True]
    assert group.behavior_logprobs is not None
    assert group.behavior_logprobs.tolist() == [0.0, -0.5, -0.25, 0.0, -2.0]
    assert group.advantages is not None
    assert group.advantages.tolist() == [1, 2, 3, 4, 5]
    assert (group.rewards.tolist(), group.policy_versions.tolist()) == ([1.0, 0.0], [3, 3])


@pytest.mark.parametrize(
    "row",
    [[1.0, 2.0, 3.0], [1, 2, 3], [1.0, 2, np.float64(3)], (1.0, 2.0, 3.0), np.arange(1.0, 4.0), [2**70 / 2**70, 2, 3]],
)
def test_floats_may_be_given_as_any_numbers(row: Any) -> None:
    group = grouped(advantages=[row, [4.0, 5.0]])

    assert group.advantages is not None
    assert group.advantages.tolist() == [1, 2, 3, 4, 5]


def test_the_first_token_of_a_sequence_never_trains() -> None:
    group = grouped(masks=[[5, 6, 7], [-100, 8]], inference_logprobs=[[-3.0, -0.5, -0.25], [1.0, -2.0]])

    assert group.loss_mask.tolist() == [False, True, True, False, True]
    assert scored_of(group).masks == [[-100, 6, 7], [-100, 8]]


@pytest.mark.parametrize(
    ("fault", "changed", "message"),
    [
        ("masks", {"masks": [[-100, 6, 9], [-100, 8]]}, r"masks\[0\]\[2\]: expected -100, or 7, its token, got 9"),
        ("masks", {"masks": [[-100, 6, 7], [-100, 1]]}, r"masks\[1\]\[1\]: expected -100, or 8"),
        (
            "logprobs",
            {"inference_logprobs": [[1.0, -1.0, -1.0], [-1.0, 1.0]]},
            r"inference_logprobs.1..1.: expected 0 or less where a token trains, got 1: 1 marks positions that do not",
        ),
        ("numbers", {"tokens": [[5, 6, 2**31], [5, 8]]}, "tokens: expected whole numbers of 32 bits, got others"),
        ("numbers", {"tokens": [[5, 6.0, 7], [5, 8]]}, "tokens: expected whole numbers of 32 bits, got others"),
        ("numbers", {"tokens": [[5, 6, None], [5, 8]]}, "tokens: expected whole numbers of 32 bits, got others"),
        ("record", {"tokens": [[-5, 6, 7], [5, 8]]}, "tokens: expected ids of 0 or more, got -5"),
        ("numbers", {"scores": ["1", 0.0]}, "scores: expected numbers that float32 can hold, got others"),
        ("numbers", {"scores": [1e39, 0.0]}, "scores: expected finite numbers that float32 can hold, got inf"),
        ("numbers", {"scores": [float("nan"), 0.0]}, "scores: expected finite numbers that float32 can hold, got nan"),
        (
            "numbers",
            {"inference_logprobs": [[float("nan"), -1.0, -1.0], [1.0, -1.0]]},
            "inference_logprobs: expected finite numbers that float32 can hold, got nan",
        ),
        (
            "numbers",
            {
                "distill_token_ids": [[[], [1], [2]], [[], [3]]],
                "distill_logprobs": [[[], [-1.0], [float("-inf")]], [[], [-1.0]]],
            },
            "distill_logprobs: expected finite numbers that float32 can hold, got -inf",
        ),
        (
            "temperature",
            {"generation_params": {"temperature": "hot"}},
            "temperature of sequence 0: expected a number of 0 or more",
        ),
        (
            "temperature",
            {"overrides": [{}, {"temperature": -1}]},
            "temperature of sequence 1: expected a number of 0 or more, got -1",
        ),
        ("sequences", {"tokens": [], "masks": [], "scores": []}, "tokens: expected at least one sequence, got none"),
        ("lengths", {"masks": [[-100, 6, 7]]}, r"masks: expected lists of \[3, 2\] entries, as in tokens, got \[3\]"),
        ("lengths", {"masks": []}, r"masks: expected lists of \[3, 2\] entries, as in tokens, got \[\]"),
        ("lengths", {"scores": [1.0]}, "scores: expected one for each of 2 sequences, got 1"),
        ("lengths", {"advantages": [[0.0] * 3] * 2}, r"advantages: expected lists of \[3, 2\] .* got \[3, 3\]"),
        ("lengths", {"overrides": [{}]}, "overrides: expected one for each of 2 sequences, got 1"),
        ("lengths", {"tokens": [5, 6], "masks": [-100, 6]}, "expected lists, with one list for each sequence"),
        ("teacher", {"distill_token_ids": [[[]] * 3, [[]] * 2]}, "expected both or neither, got one"),
    ],
)
def test_a_group_that_cannot_be_trained_on_is_refused_with_its_fault_and_field(
    fault: str, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(Untrainable, match=message) as refused:
        grouped(**changed)

    assert refused.value.fault == fault
    assert pickle.loads(pickle.dumps(refused.value)).fault == fault  # noqa: S301 (its own)


@pytest.mark.parametrize("name", ScoredData.optional)
def test_null_and_an_empty_value_both_mean_that_a_field_is_absent(name: str) -> None:
    empty: dict[str, Any] = {"env_id": None, "generation_params": {}, "group_overrides": {}}

    for nothing in (None, empty.get(name, [])):
        group = grouped(**{name: nothing})

        assert group.meta == {}
        assert group.columns().keys() == grouped().columns().keys()


# -- a teacher ---------------------------------------------------------------------------------------------------------

IDS = [[[], [6, 1], [7]], [[], [2, 8, 9]]]
LOGPROBS = [[[], [-0.5, -1.0], [-0.1]], [[], [-3.0, -1.0, -2.0]]]


def test_candidates_stay_at_their_token_the_likeliest_first_and_rows_are_padded() -> None:
    group = grouped(distill_token_ids=IDS, distill_logprobs=LOGPROBS)

    none = [-1, -1, -1]
    assert group.teacher_ids is not None
    assert group.teacher_logprobs is not None
    assert group.teacher_ids.tolist() == [none, [6, 1, -1], [7, -1, -1], none, [8, 9, 2]]
    assert group.teacher_logprobs[4].tolist() == [-1.0, -2.0, -3.0]


def test_groups_of_one_width_fit_into_one_batch_and_the_token_itself_is_kept() -> None:
    scored = ScoredData(
        tokens=[[5, 6, 7], [5, 8]],
        masks=[[-100, 6, 7], [-100, 8]],
        scores=[1.0, 0.0],
        distill_token_ids=IDS,
        distill_logprobs=LOGPROBS,
    )

    wide, narrow = (to_group(scored, env="math", instance_id=str(k), policy_version=0, candidates=k) for k in (4, 2))

    assert wide.teacher_ids is not None
    assert wide.teacher_ids.tolist()[4] == [8, 9, 2, -1]
    assert narrow.teacher_ids is not None
    assert narrow.teacher_ids.tolist()[4] == [8, 9]
    assert TrainBatch.pack([wide, to_group(scored, env="m", instance_id="1", policy_version=0, candidates=4)])


@pytest.mark.parametrize(
    ("ids", "logprobs", "message"),
    [
        (IDS, [[[], [-0.5], [-0.1]], [[], [-3.0, -1.0, -2.0]]], "distill_logprobs: expected 2 at token 1 of the group"),
        ([[None, [6, 1], [7]], [[], [2, 8, 9]]], LOGPROBS, "expected lists"),
        (
            [[[], [6, 6], [7]], [[], [2, 8, 9]]],
            LOGPROBS,
            "each candidate of a token once, got 6 repeatedly for token 1",
        ),
        (
            [[[], [6, -1], [7]], [[], [2, 8, 9]]],
            LOGPROBS,
            "distill_token_ids.*: expected candidates of 0 or more, got -1",
        ),
        (IDS, [[[], [-0.5, 1.0], [-0.1]], [[], [-3.0, -1.0, -2.0]]], "expected log-probabilities of 0 or less, got 1"),
    ],
)
def test_candidates_that_are_not_valid_cannot_be_trained_on(ids: object, logprobs: object, message: str) -> None:
    with pytest.raises(Untrainable, match=message):
        grouped(distill_token_ids=ids, distill_logprobs=logprobs)


# -- meta --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"group_overrides": {"temperature": 0.5}}, [0.5, 0.5]),
        ({"group_overrides": {"temperature": 0.5}, "generation_params": {"temperature": 0.7}}, [0.7, 0.7]),
        ({"overrides": [{"temperature": 0.9}, {}], "generation_params": {"temperature": 0.7}}, [0.9, 0.7]),
        ({"overrides": [{}, {"temperature": 2}]}, [1.0, 2.0]),
        ({"overrides": [{"set_advantage_to_zero": True}, {}]}, None),
        ({"generation_params": {"temperature": 0}}, [1.0, 1.0]),
    ],
)
def test_a_sequences_own_temperature_comes_before_those_of_the_group(fields: dict[str, Any], expected: object) -> None:
    assert grouped(**fields).meta.get("temperatures") == expected


def test_an_override_may_give_the_stop_reason_and_it_comes_back() -> None:
    overrides = [{"finish_reason": "length", "note": 1}, {"finish_reason": "eos"}]
    group = grouped(overrides=overrides)

    assert group.stop_reasons.tolist() == [StopReason.LENGTH, StopReason.STOP]
    assert scored_of(group).overrides == overrides
    assert grouped().stop_reasons.tolist() == [StopReason.STOP] * 2
    assert scored_of(grouped()).overrides is None


@pytest.mark.parametrize("reason", list(StopReason))
def test_the_stop_reason_of_a_group_of_another_source_is_given_as_an_override(reason: StopReason) -> None:
    group = of_turns(".x", ".x", stop_reasons=[reason, StopReason.STOP])

    there = to_group(decode_scored(from_group(group))[0], env="math", instance_id="0", policy_version=0)

    assert there.stop_reasons.tolist() == group.stop_reasons.tolist()


def test_the_rest_of_a_group_keeps_its_own_messages_and_overrides() -> None:
    spoken = [[{"role": "user", "content": name}] for name in "ab"]
    group = grouped(messages=spoken, overrides=[{}, {"temperature": 2.0}], env_id=4)

    left = scored_of(group.select(np.array([False, True])))

    assert (left.tokens, left.messages, left.overrides) == ([[5, 8]], spoken[1:], [{"temperature": 2.0}])
    assert left.env_id == 4


def test_a_group_of_another_source_is_translated_as_far_as_the_contract_goes() -> None:
    group = TrajectoryGroup.build(
        env="digits",
        instance_id="7",
        sequences=[[1, 2, 3]],
        loss_mask=[[False, True, False]],
        rewards=[1.0],
        behavior_logprobs=[0.0, -0.5, 0.0],
        teacher_ids=[[-1, -1], [2, 4], [-1, -1]],
        teacher_logprobs=[[0.0, 0.0], [-0.5, -np.inf], [0.0, 0.0]],
        meta={"task": 3, "temperature": 0.7, "messages": [{"role": "user", "content": "of every sequence"}]},
    )

    decoded = json.loads(from_group(group))

    assert decoded["masks"] == [[-100, 2, -100]]
    assert decoded["inference_logprobs"] == [[1.0, -0.5, 1.0]]
    assert decoded["distill_token_ids"] == [[[], [2], []]]
    assert decoded["generation_params"] == {"temperature": 0.7}
    assert decoded["messages"] is None
    assert decoded.keys() == {"tokens", "masks", "scores", *ScoredData.optional}
