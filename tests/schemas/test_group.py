from __future__ import annotations

import pickle
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import GroupId, StopReason, TrajectoryGroup, TrajectoryId
from penstock.errors import InvalidRecord
from penstock.records import Array


def built(**changed: Any) -> TrajectoryGroup:
    """Return two sequences, of 3 and 4 tokens, with the columns in `changed`."""
    columns: dict[str, Any] = {
        "env": "test",
        "instance_id": "0",
        "tokens": [1, 2, 3, 4, 5, 6, 7],
        "offsets": [0, 3, 7],
        "loss_mask": [0, 1, 1, 0, 0, 1, 1],
        "rewards": [1.0, 0.0],
    }
    return TrajectoryGroup.build(**(columns | changed))


def complete(seed: int = 0, lengths: tuple[int, ...] = (3, 4), *, versions_by_token: bool = False) -> TrajectoryGroup:
    """Return a group with every column."""
    random = np.random.default_rng(seed)
    count, total = len(lengths), sum(lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    first = offsets[:-1][np.diff(offsets) > 0]
    mask = random.random(total) < 0.5
    mask[first] = False

    def floats(*shape: int) -> Array:
        return random.standard_normal(shape).astype(np.float32)

    return TrajectoryGroup.build(
        env="test",
        instance_id=str(seed),
        tokens=random.integers(0, 2**31 - 1, total, np.int32),
        offsets=offsets,
        loss_mask=mask,
        rewards=floats(count),
        policy_versions=random.integers(0, 2**40, total if versions_by_token else count),
        stop_reasons=random.integers(0, len(StopReason), count).astype(np.uint8),
        rollout_ids=random.permutation(count),
        reward_noise=np.abs(floats(count)),
        behavior_logprobs=floats(total),
        token_rewards=floats(total),
        values=floats(total),
        advantages=floats(total),
        ref_logprobs=floats(total),
        teacher_ids=random.integers(-1, 1000, (total, 3), np.int32),
        teacher_logprobs=floats(total, 3),
        routed_experts=random.integers(0, 300, (total, 2, 4), np.uint16),
        support_ids=np.full((total, 5), -1, np.int32),
        reward_parts={"score": floats(count), "format": floats(count)},
        meta={"messages": [{"role": "user", "content": "1 + 1"}], "temperature": 0.7, "nothing": None},
    )


def assert_same(left: TrajectoryGroup, right: TrajectoryGroup) -> None:
    assert (left.env, left.instance_id, left.meta) == (right.env, right.instance_id, right.meta)
    ours, theirs = left.columns(), right.columns()
    assert list(ours) == list(theirs)
    for name, column in ours.items():
        assert column.dtype == theirs[name].dtype
        assert column.shape == theirs[name].shape
        assert column.tobytes() == theirs[name].tobytes()


# -- invalid groups --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens": None}, r"tokens: expected dtype int32, got object"),
        ({"tokens": [[1, 2, 3], [4, 5, 6]]}, r"tokens: expected shape \[N=\?\], got \[2, 3\]"),
        ({"tokens": [1.0] * 7}, "tokens: expected dtype int32, got float64"),
        ({"tokens": [1, 2, 3, 4, 5, 6, 2**31]}, "tokens: expected dtype int32, got int64"),
        ({"tokens": [1, 2, 3, 4, 5, 6, -7]}, "tokens: expected ids of 0 or more, got -7"),
        ({"offsets": [0, 3, 6]}, r"offsets: expected to run from 0 to 7 \(the number of tokens\).* got \[0, 3, 6\]"),
        ({"offsets": [1, 3, 7]}, r"offsets: expected to run from 0 to 7 .* got \[1, 3, 7\]"),
        ({"offsets": [0, 8, 7]}, r"offsets: expected .* without decrease, got \[0, 8, 7\]"),
        ({"offsets": [0, 7]}, r"rewards: expected shape \[S=1\], got \[2\]"),
        ({"offsets": []}, "offsets: expected at least the entry 0, got none"),
        ({"offsets": [[0, 3, 7]]}, r"offsets: expected shape \[F=\?\], got \[1, 3\]"),
        ({"loss_mask": [0, 1, 1]}, r"loss_mask: expected shape \[N=7\], got \[3\]"),
        ({"loss_mask": [0, 1, 2, 0, 0, 1, 1]}, "loss_mask: expected dtype bool, got int64"),
        ({"loss_mask": [1, 1, 1, 0, 0, 1, 1]}, "loss_mask: expected false on the first token .* true at token 0"),
        ({"loss_mask": [0, 1, 1, 1, 0, 1, 1]}, "loss_mask: expected false on the first token .* true at token 3"),
        ({"rewards": [1.0, float("nan")]}, "rewards: expected finite values, got nan at index 1"),
        ({"rewards": [float("inf"), 0.0]}, "rewards: expected finite values, got inf at index 0"),
        ({"rewards": [1e300, 0.0]}, "rewards: expected finite values, got inf at index 0"),
        ({"rewards": ["a", "b"]}, "rewards: expected dtype float32, got <U1"),
        ({"rewards": [1.0]}, r"rewards: expected shape \[S=2\], got \[1\]"),
        ({"policy_versions": [1, 2, 3]}, r"policy_versions: expected shape \[S=2\] or \[N=7\], got \[3\]"),
        ({"policy_versions": [1.5, 2.5]}, "policy_versions: expected dtype int64, got float64"),
        ({"stop_reasons": [0, 5]}, "stop_reasons: expected 0 to 4, got 5"),
        ({"stop_reasons": [0, 300]}, "stop_reasons: expected dtype uint8, got int64"),
        ({"rollout_ids": [3, 3]}, r"rewards: expected one value for all sequences of a rollout, got \[1.0, 0.0\]"),
        ({"rollout_ids": [-1, 0]}, r"rollout_ids: expected 0 to 65535, got -1 to 0"),
        ({"rollout_ids": [0, 2**40]}, "rollout_ids: expected 0 to 65535, got"),
        ({"behavior_logprobs": [0.0] * 6}, r"behavior_logprobs: expected shape \[N=7\], got \[6\]"),
        ({"behavior_logprobs": [0.0] * 6 + [float("-inf")]}, "behavior_logprobs: expected finite values, got -inf at"),
        ({"ref_logprobs": [0.0] * 6 + [float("nan")]}, "ref_logprobs: expected finite values, got nan at index 6"),
        ({"token_rewards": [0.0] * 6 + [float("nan")]}, "token_rewards: expected finite values, got nan at index 6"),
        ({"values": [0.0] * 6 + [float("nan")]}, "values: expected finite values, got nan at index 6"),
        ({"values": [0.0, 0.0]}, r"values: expected shape \[N=7\], got \[2\]"),
        ({"advantages": [0.0] * 6 + [float("nan")]}, "advantages: expected finite values, got nan at index 6"),
        ({"teacher_ids": [[1, 2]] * 7}, "teacher_ids, teacher_logprobs: expected both columns or neither"),
        (
            {"teacher_ids": [[1, 2]] * 7, "teacher_logprobs": [[0.0]] * 7},
            r"teacher_logprobs: expected shape \[N=7, K=2\], got \[7, 1\]",
        ),
        ({"teacher_ids": [[1, 2]] * 6 + [[1]], "teacher_logprobs": [[0.0]] * 7}, "teacher_ids: expected rows of one"),
        ({"teacher_ids": [[-2]] * 7, "teacher_logprobs": [[0.0]] * 7}, "teacher_ids: expected ids of 0 or more, or −1"),
        (
            {"teacher_ids": [[1]] * 7, "teacher_logprobs": [[0.0]] * 6 + [[float("nan")]]},
            r"teacher_logprobs: expected no NaN, got one at \[6, 0\]",
        ),
        (
            {"routed_experts": np.ones((7, 2), np.uint8)},
            r"routed_experts: expected shape \[N=7, L=\?, E=\?\], got \[7, 2\]",
        ),
        ({"routed_experts": [[[1, 2]]] * 6}, r"routed_experts: expected shape \[N=7, L=\?, E=\?\], got \[6, 1, 2\]"),
        ({"routed_experts": [[[1, -2]]] * 7}, "routed_experts: expected dtype uint8, got int64"),
        ({"routed_experts": [[[1, 2**16]]] * 7}, "routed_experts: expected dtype uint16, got int64"),
        ({"routed_experts": [[[1.0, 2.0]]] * 7}, "routed_experts: expected dtype uint8, got float64"),
        ({"reward_parts": {"format": [1.0]}}, r"reward_parts.format: expected shape \[S=2\], got \[1\]"),
        ({"reward_parts": {"format": [1.0, float("nan")]}}, "reward_parts.format: expected finite values, got nan"),
        ({"env": None}, "env: expected str, got NoneType"),
        ({"instance_id": 17}, r"instance_id: expected str, got int \(17\)"),
        ({"meta": {"image": object()}}, "meta: expected values that JSON can hold"),
        ({"meta": {1: 2}}, "meta: expected values that JSON can hold, with str keys"),
        ({"meta": {"n": 2**70}}, "meta: expected values that JSON can hold"),
    ],
)
def test_a_broken_column_is_refused_by_name_with_the_expected_and_actual_value(
    changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRecord, match=message):
        built(**changed)


def test_a_refused_group_is_named() -> None:
    with pytest.raises(InvalidRecord, match=r"^rewards: .* got nan at index 1 \(in test/0\)$"):
        built(rewards=[1.0, float("nan")])


def test_an_unknown_column_is_refused_with_the_names_that_exist() -> None:
    with pytest.raises(TypeError, match=r"unknown columns \['logprobs'\]; a group has \['advantages', "):
        built(logprobs=[0.0] * 7)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"loss_mask": None}, "loss_mask: expected a column of bool, got none"),
        ({"rewards": [1.0, 0.0]}, "rewards: expected a numpy array of float32, got list"),
    ],
    ids=["missing", "no array"],
)
def test_a_column_that_is_no_array_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRecord, match=message):
        msgspec.structs.replace(built(), **changed).validate()


# -- valid groups ----------------------------------------------------------------------------------------------------


def test_sequences_and_flat_columns_build_the_same_group() -> None:
    by_row = TrajectoryGroup.build(
        env="test",
        instance_id="0",
        sequences=[[1, 2, 3], [4, 5, 6, 7]],
        loss_mask=[[0, 1, 1], [0, 0, 1, 1]],
        rewards=[1.0, 0.0],
    )

    assert_same(by_row, built())


@pytest.mark.parametrize("given", [{"sequences": []}, {"tokens": [], "offsets": [0]}])
def test_a_group_without_sequences_is_refused_with_the_remedy(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRecord, match=r"at least one sequence, got 0.*do not send it \(in e/0\)"):
        TrajectoryGroup.build(env="e", instance_id="0", loss_mask=[], rewards=[], **given)


def test_a_selection_of_no_sequence_is_refused() -> None:
    with pytest.raises(InvalidRecord, match="select: expected to keep at least one sequence"):
        built().select(np.zeros(len(built()), np.bool_))


def test_a_sequence_may_be_empty() -> None:
    sparse = TrajectoryGroup.build(
        env="e", instance_id="0", sequences=[[], [1, 2], []], loss_mask=[[], [0, 1], []], rewards=[0, 1, 2]
    )

    assert sparse.lengths().tolist() == [0, 2, 0]
    assert sparse.completion_lengths().tolist() == [0, 1, 0]


def test_teacher_columns_may_come_as_rows_or_flat() -> None:
    rows = built(
        teacher_ids=[[[1, 2]] * 3, [[3, -1]] * 4], teacher_logprobs=[[[-1.0, -2.0]] * 3, [[-3.0, -np.inf]] * 4]
    )
    flat = built(teacher_ids=[[1, 2]] * 3 + [[3, -1]] * 4, teacher_logprobs=[[-1.0, -2.0]] * 3 + [[-3.0, -np.inf]] * 4)

    assert_same(rows, flat)


def test_routed_experts_come_as_rows_or_flat_in_the_narrowest_dtype_that_holds_them() -> None:
    rows = built(routed_experts=[[[[1, 2]]] * 3, [[[255, 0]]] * 4])
    flat = built(routed_experts=[[[1, 2]]] * 3 + [[[255, 0]]] * 4)
    wide = built(routed_experts=[[[1, 2]]] * 3 + [[[256, 0]]] * 4)
    given = built(routed_experts=np.ones((7, 1, 2), np.uint16))

    assert_same(rows, flat)
    dtypes = [g.routed_experts.dtype for g in (rows, wide, given) if g.routed_experts is not None]
    assert dtypes == [np.uint8, np.uint16, np.uint16]


def test_an_array_that_fits_is_not_copied_and_becomes_read_only() -> None:
    tokens = np.arange(7, dtype=np.int32)

    shared = built(tokens=tokens)

    assert shared.tokens is tokens
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


def test_every_column_of_a_group_is_read_only() -> None:
    assert not any(column.flags.writeable for column in complete().columns().values())


def test_meta_is_the_groups_own() -> None:
    meta = {"temperature": 0.7}

    kept = built(meta=meta)
    meta["temperature"] = 1.0

    assert kept.meta == {"temperature": 0.7}


# -- asking ----------------------------------------------------------------------------------------------------------


def test_a_group_has_an_id_and_a_size() -> None:
    named = built(env="chain_sum", instance_id="17", rollout_ids=[4, 2])

    assert named.id == GroupId("chain_sum", "17")
    assert named.ids == [TrajectoryId("chain_sum", "17", 4), TrajectoryId("chain_sum", "17", 2)]
    assert len(named) == 2
    assert named.lengths().tolist() == [3, 4]
    assert named.completion_lengths().tolist() == [2, 2]
    assert named.sequence_of_token().tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert named.nbytes == sum(column.nbytes for column in named.columns().values())
    assert "chain_sum/17: 2 sequences, 7 tokens" in repr(named)


def test_a_row_is_a_view_of_its_span() -> None:
    whole = complete()

    row = whole[1]

    assert row.id == whole.ids[1]
    assert row.reward == pytest.approx(float(whole.rewards[1]))
    assert row.stop_reason is StopReason(int(whole.stop_reasons[1]))
    assert row.policy_versions.tolist() == whole.policy_versions[1:2].tolist()
    for name in ("tokens", "loss_mask", "behavior_logprobs", "token_rewards", "values", "advantages", "ref_logprobs"):
        assert np.shares_memory(getattr(row, name), getattr(whole, name))
        assert getattr(row, name).tolist() == getattr(whole, name)[3:7].tolist()
    assert row.teacher_ids is not None
    assert row.teacher_ids.shape == (4, 3)
    assert row.routed_experts is not None
    assert row.routed_experts.shape == (4, 2, 4)


def test_versions_by_token_are_cut_with_the_row() -> None:
    whole = complete(versions_by_token=True)

    assert [row.policy_versions.tolist() for row in whole] == [
        whole.policy_versions[:3].tolist(),
        whole.policy_versions[3:].tolist(),
    ]


def test_rows_are_counted_from_either_end_and_run_out() -> None:
    whole = built()

    assert whole[-1].id == whole[1].id
    assert [row.id for row in whole] == whole.ids
    with pytest.raises(IndexError):
        whole[2]


def test_the_prompt_ends_where_sampling_begins() -> None:
    assert [row.prompt_length for row in built()] == [1, 2]
    assert built(loss_mask=[0] * 7)[0].prompt_length == 3


# -- deriving --------------------------------------------------------------------------------------------------------


def test_other_rewards_share_every_other_column() -> None:
    before = complete()

    after = before.with_rewards([0.5, 0.25], parts={"format": [0.1, 0.2]})

    assert after.rewards.tolist() == [0.5, 0.25]
    assert after.reward_parts["format"].tolist() == pytest.approx([0.1, 0.2])
    assert after.reward_parts["score"] is before.reward_parts["score"]
    assert after.tokens is before.tokens
    assert before.reward_parts["format"].tolist() != after.reward_parts["format"].tolist()


@pytest.mark.parametrize("rewards", [[1.0], [1.0, float("nan")], [[1.0, 2.0]]])
def test_rewards_that_do_not_fit_are_refused(rewards: Any) -> None:
    with pytest.raises(InvalidRecord, match="rewards: expected"):
        built().with_rewards(rewards)


def test_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidRecord, match=r"reward_parts\.format: expected"):
        built().with_rewards([1.0, 2.0], parts={"format": [1.0]})


@pytest.mark.parametrize(
    ("given", "advantages"), [([2.0, -1.0], [0, 2, 2, 0, 0, -1, -1]), (np.arange(7.0), [0, 1, 2, 3, 4, 5, 6])]
)
def test_advantages_of_sequences_are_spread_over_the_loss_mask_and_those_of_tokens_kept(
    given: Any, advantages: list[float]
) -> None:
    after = built().with_advantages(given)

    assert after.advantages is not None
    assert after.advantages.tolist() == advantages


@pytest.mark.parametrize("advantages", [[1.0] * 3, [float("nan"), 1.0], [[1.0] * 7]])
def test_advantages_that_do_not_fit_are_refused(advantages: Any) -> None:
    with pytest.raises(InvalidRecord, match="advantages: expected"):
        built().with_advantages(advantages)


def test_an_owned_group_is_equal_and_shares_no_memory() -> None:
    original = complete()

    copy = original.owned()

    assert_same(copy, original)
    for name, column in copy.columns().items():
        assert not np.shares_memory(column, original.columns()[name])
        assert not column.flags.writeable


@pytest.mark.parametrize("versions_by_token", [False, True])
def test_selected_sequences_keep_every_column(versions_by_token: bool) -> None:  # noqa: FBT001 (a test's parameter)
    whole = complete(lengths=(3, 0, 4, 2), versions_by_token=versions_by_token)

    kept = whole.select(np.array([True, False, False, True]))

    kept.validate()
    assert kept.ids == [whole.ids[0], whole.ids[3]]
    for row, original in zip(kept, (whole[0], whole[3]), strict=True):
        for name in row.__struct_fields__:
            assert np.array_equal(getattr(row, name), getattr(original, name))
    assert {name: part.tolist() for name, part in kept.reward_parts.items()} == {
        name: part[[0, 3]].tolist() for name, part in whole.reward_parts.items()
    }


# -- travelling ------------------------------------------------------------------------------------------------------


lengths = st.lists(st.integers(0, 9), min_size=1, max_size=6).map(tuple)
fewer = settings(max_examples=50)


@fewer
@given(lengths=lengths, seed=st.integers(0, 2**32), versions_by_token=st.booleans())
def test_columns_and_header_are_assembled_again_bit_for_bit(
    lengths: tuple[int, ...], seed: int, *, versions_by_token: bool
) -> None:
    original = complete(seed, lengths, versions_by_token=versions_by_token)

    again = TrajectoryGroup.assemble(original.header(), original.columns())

    assert_same(again, original)
    again.validate()


def test_odd_floats_travel_bit_for_bit() -> None:
    odd = np.array([-0.0, np.finfo(np.float32).tiny / 2, np.finfo(np.float32).max, 0, 0, 0, 0], np.float32)
    original = built(behavior_logprobs=odd)

    again = TrajectoryGroup.assemble(original.header(), original.columns())

    assert again.behavior_logprobs is not None
    assert again.behavior_logprobs.tobytes() == odd.tobytes()


def test_a_group_survives_pickle() -> None:
    original = complete()

    assert_same(pickle.loads(pickle.dumps(original)), original)  # noqa: S301 (our own bytes)


@pytest.mark.parametrize("header", [b"", b"\xc1", msgspec.msgpack.encode(("env", 1, {})), msgspec.msgpack.encode([])])
def test_a_header_that_makes_no_group_is_refused(header: bytes) -> None:
    with pytest.raises(InvalidRecord, match="header: expected"):
        TrajectoryGroup.assemble(header, built().columns())
