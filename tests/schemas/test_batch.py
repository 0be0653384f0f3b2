from __future__ import annotations

import pickle
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import GroupId, TrainBatch, TrajectoryGroup, TrajectoryId
from penstock.errors import InvalidRecord
from penstock.records import Array, PackedGroup, Packer
from penstock.testing import batch, group


def rich(lengths: tuple[int, ...], index: int = 0, *, versions_by_token: bool = False) -> TrajectoryGroup:
    """Return a group of completions of `lengths` after a prompt of 2, with every column."""
    random = np.random.default_rng(index)
    total, count = sum(lengths) + 2 * len(lengths), len(lengths)

    def floats(*shape: int) -> Array:
        return random.standard_normal(shape).astype(np.float32)

    return group(
        completion_lengths=lengths,
        instance_id=str(index),
        seed=index,
        rewards=floats(count).tolist(),
        policy_versions=random.integers(0, 9, total if versions_by_token else count),
        stop_reasons=random.integers(0, 5, count),
        rollout_ids=random.permutation(count),
        reward_noise=np.abs(floats(count)),
        token_rewards=floats(total),
        values=floats(total),
        advantages=floats(total),
        ref_logprobs=floats(total),
        teacher_ids=random.integers(-1, 99, (total, 2)),
        teacher_logprobs=floats(total, 2),
        routed_experts=random.integers(0, 256, (total, 3, 2), np.uint8),
        support_ids=np.full((total, 3), -1),
        reward_parts={"score": floats(count)},
        meta={"index": index},
    )


def totals(of: TrainBatch) -> tuple[int, int, int, int]:
    return of.loss_tokens, of.loss_rollouts, of.loss_groups, of.total_rollouts


def noise_of(one: TrajectoryGroup) -> list[float]:
    assert one.reward_noise is not None
    listed: list[float] = one.reward_noise.tolist()
    return listed


def rows(packed: TrainBatch) -> list[dict[str, Any]]:
    """Return the columns of each sequence of the batch."""
    by_token = len(packed.policy_versions) != len(packed)
    spans = [slice(a, b) for a, b in zip(packed.cu_seqlens[:-1], packed.cu_seqlens[1:], strict=True)]
    over_sequences = {"rewards", "reward_noise", "stop_reasons", "rollout_ids"} | (
        set() if by_token else {"policy_versions"}
    )
    return [
        {
            name: column[s].tolist() if name in over_sequences or "." in name else column[span].tolist()
            for name, column in packed.columns().items()
            if name != "cu_seqlens"
        }
        for s, span in enumerate(spans)
    ]


def assert_same(left: TrainBatch, right: TrainBatch) -> None:
    assert left.groups == right.groups
    assert totals(left) == totals(right)
    ours, theirs = left.columns(), right.columns()
    assert list(ours) == list(theirs)
    for name, column in ours.items():
        assert (column.dtype, column.shape) == (theirs[name].dtype, theirs[name].shape)
        assert column.tobytes() == theirs[name].tobytes()


# -- packing ---------------------------------------------------------------------------------------------------------


def test_groups_lie_end_to_end() -> None:
    first, second = rich((1, 3)), rich((2,), 1)

    packed = TrainBatch.pack([first, second])

    assert packed.tokens.tolist() == [*first.tokens.tolist(), *second.tokens.tolist()]
    assert packed.cu_seqlens.tolist() == [0, 3, 8, 12]
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert packed.groups == (
        PackedGroup("test", "0", 2, {"index": 0}, first.loss_mask.sum()),
        PackedGroup("test", "1", 1, {"index": 1}, second.loss_mask.sum()),
    )
    assert packed.groups[1].id == GroupId("test", "1")
    assert packed.ids == [*first.ids, *second.ids]
    assert packed.ids[2] == TrajectoryId("test", "1", 0)
    assert len(packed) == 3
    assert packed.lengths().tolist() == [3, 5, 4]
    assert packed.completion_lengths().tolist() == [1, 3, 2]
    assert packed.sequence_of_token().tolist() == [0] * 3 + [1] * 5 + [2] * 4
    assert packed.group_of_sequence().tolist() == [0, 0, 1]
    assert packed.nbytes == sum(column.nbytes for column in packed.columns().values())
    assert repr(packed) == "<TrainBatch: 2 groups, 3 sequences, 12 tokens>"


many = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4).map(tuple), min_size=1, max_size=5)
fewer = settings(max_examples=40)


@fewer
@given(many, st.booleans())
def test_every_row_of_every_group_is_found_again(shapes: list[tuple[int, ...]], versions_by_token: bool) -> None:  # noqa: FBT001 (drawn)
    groups = [rich(shape, i, versions_by_token=versions_by_token) for i, shape in enumerate(shapes)]

    packed = TrainBatch.pack(groups)

    found_rows = rows(packed)
    originals = [(g, row) for g in groups for row in g]
    assert len(found_rows) == len(originals)
    for found, (_, row) in zip(found_rows, originals, strict=True):
        assert found["tokens"] == row.tokens.tolist()
        assert found["loss_mask"] == row.loss_mask.tolist()
        assert found["rewards"] == row.reward
        assert found["stop_reasons"] == row.stop_reason
        for name in ("behavior_logprobs", "token_rewards", "values", "advantages", "ref_logprobs"):
            assert found[name] == getattr(row, name).tolist()
        for name in ("teacher_ids", "teacher_logprobs", "routed_experts", "support_ids"):
            assert found[name] == getattr(row, name).tolist()
        if versions_by_token:
            assert found["policy_versions"] == row.policy_versions.tolist()
    assert packed.position_ids.tolist() == [position for _, row in originals for position in range(len(row.tokens))]
    assert [found["reward_noise"] for found in found_rows] == [x for g in groups for x in noise_of(g)]
    assert packed.reward_parts["score"].tolist() == [x for g in groups for x in g.reward_parts["score"].tolist()]
    assert packed.loss_tokens == sum(int(g.loss_mask.sum()) for g in groups)
    assert packed.loss_rollouts == sum(int((g.completion_lengths() > 0).sum()) for g in groups)
    assert packed.loss_groups == sum(bool(g.loss_mask.any()) for g in groups)
    assert [g.loss_tokens for g in packed.groups] == [int(g.loss_mask.sum()) for g in groups]
    assert packed.total_rollouts == len(packed)


def test_groups_are_brought_into_the_order_of_their_ids_with_all_that_is_theirs() -> None:
    groups = [
        group(instance_id=name, seed=number, completion_lengths=[3, 1 + number]) for number, name in enumerate("cab")
    ]

    ordered = TrainBatch.pack(groups).in_order()

    expected = TrainBatch.pack([groups[1], groups[2], groups[0]])
    assert ordered.groups == expected.groups
    for name, column in expected.columns().items():
        assert np.array_equal(ordered.columns()[name], column), name
    assert ordered.in_order() is ordered


def test_versions_a_sequence_and_versions_a_token_are_joined_by_token() -> None:
    mixed = TrainBatch.pack([rich((1,)), rich((2,), 1, versions_by_token=True)])

    assert len(mixed.policy_versions) == 7
    assert mixed.policy_versions[:3].tolist() == rich((1,)).policy_versions.tolist() * 3


@pytest.mark.parametrize("by_token", [[], [1], [0, 3], [0, 1, 2, 3, 4, 5, 6, 7]])
def test_versions_by_token_and_by_sequence_are_packed_together(by_token: list[int]) -> None:
    groups = [group(completion_lengths=[2, n + 1], instance_id=str(n), policy_version=n) for n in range(8)]
    for n in by_token:
        versions = np.arange(len(groups[n].tokens), dtype=np.int64)
        groups[n] = msgspec.structs.replace(groups[n], policy_versions=versions)

    packed = TrainBatch.pack(groups)

    expected = [
        version
        for n, record in enumerate(groups)
        for version in (
            record.policy_versions.tolist() if n in by_token else [n] * (len(record.tokens) if by_token else 2)
        )
    ]
    assert packed.policy_versions.tolist() == expected


def test_the_oldest_version_of_each_sequence_counts() -> None:
    by_token = group(completion_lengths=[1, 2], policy_versions=[5, 4, 6, 7, 7, 3, 9])

    assert TrainBatch.pack([by_token]).lags(9).tolist() == [5, 6]
    assert TrainBatch.pack([group(completion_lengths=[1, 2], policy_versions=[5, 8])]).lags(9).tolist() == [4, 1]


def test_versions_by_token_of_as_many_tokens_as_sequences_become_the_oldest_of_each_sequence() -> None:
    three = TrajectoryGroup.build(
        env="e",
        instance_id="0",
        sequences=[[1, 2, 3]],
        loss_mask=[[0, 1, 1]],
        rewards=[0],
        policy_versions=[5, 4, 6],
    )
    empty = TrajectoryGroup.build(
        env="e",
        instance_id="1",
        sequences=[[], []],
        loss_mask=[[], []],
        rewards=[0, 0],
        policy_versions=[7, 8],
    )

    packed = TrainBatch.pack([three, empty])

    assert packed.lags(9).tolist() == [5, 2, 1]


def test_a_batch_owns_its_memory_and_cannot_be_changed() -> None:
    original = rich((3, 4))

    packed = TrainBatch.pack([original])

    for name, column in packed.columns().items():
        assert not column.flags.writeable
        assert name not in original.columns() or not np.shares_memory(column, original.columns()[name])


def test_versions_that_were_joined_by_token_cannot_be_changed() -> None:
    packed = TrainBatch.pack([rich((3,)), rich((4,), 1, versions_by_token=True)])

    assert not packed.policy_versions.flags.writeable


def test_nothing_cannot_be_packed() -> None:
    with pytest.raises(InvalidRecord, match="expected at least one group, got none"):
        TrainBatch.pack([])


def test_a_group_that_does_not_fit_is_refused_with_the_sizes() -> None:
    packer = Packer(max_tokens=10)
    packer.add(group(completion_lengths=[4]))

    assert not packer.fits(group(completion_lengths=[3]))
    with pytest.raises(InvalidRecord, match=r"expected at most 4 more \(of 10\), got a group of 5"):
        packer.add(group(completion_lengths=[3]))
    assert (packer.tokens, packer.groups, packer.rollouts) == (6, 1, 1)


def test_groups_with_other_columns_are_refused_by_name() -> None:
    packer = Packer(max_tokens=100)
    packer.add(group(instance_id="0"))

    with pytest.raises(InvalidRecord, match=r"test/1: expected the columns .* missing \[\], extra \['advantages'\]"):
        packer.add(group(instance_id="1").with_advantages([1.0, 2.0]))


def test_groups_with_another_number_of_teacher_candidates_are_refused() -> None:
    packer = Packer(max_tokens=100)
    packer.add(group(completion_lengths=[1], teacher_ids=[[1, 2]] * 3, teacher_logprobs=[[0, 0]] * 3))

    with pytest.raises(InvalidRecord, match=r"expected 2 teacher candidates a token, .* got 1"):
        packer.add(group(completion_lengths=[1], teacher_ids=[[1]] * 3, teacher_logprobs=[[0]] * 3))


@pytest.mark.parametrize(
    ("other", "described"),
    [([[1, 2]], "2 experts of 1 layers"), ([[1], [2]], "1 experts of 2 layers"), ([[1, 256], [3, 4]], "uint16")],
)
def test_groups_with_experts_of_another_model_are_refused(other: list[list[int]], described: str) -> None:
    packer = Packer(max_tokens=100)
    packer.add(group(completion_lengths=[1], routed_experts=[[[1, 2], [3, 4]]] * 3))

    with pytest.raises(InvalidRecord, match=rf"expected 2 experts of 2 layers \(uint8\) a token, .* got .*{described}"):
        packer.add(group(completion_lengths=[1], routed_experts=[other] * 3))


def test_groups_with_supports_of_another_width_are_refused() -> None:
    packer = Packer(max_tokens=100)
    packer.add(group(completion_lengths=[1], support_ids=np.full((3, 4), -1)))

    with pytest.raises(InvalidRecord, match=r"expected a support of 4 a token, .* got a support of 5"):
        packer.add(group(completion_lengths=[1], support_ids=np.full((3, 5), -1)))


def test_candidates_that_exceed_the_memory_are_refused_and_the_packer_continues() -> None:
    packer = Packer(max_tokens=2**40)

    with pytest.raises(InvalidRecord, match=r"expected memory for a batch of 1099511627776 tokens, .* fewer .* than 9"):
        packer.add(group(completion_lengths=[1], teacher_ids=[[1] * 9] * 3, teacher_logprobs=[[0] * 9] * 3))
    assert (packer.groups, packer.tokens) == (0, 0)


def test_a_packer_begins_anew_after_each_batch() -> None:
    packer = Packer(max_tokens=100)
    packer.add(group(instance_id="0"))
    first = packer.pack()

    packer.add(group(instance_id="1").with_advantages([1.0, 2.0]))
    second = packer.pack()

    assert first.advantages is None
    assert second.advantages is not None
    assert [g.instance_id for g in (*first.groups, *second.groups)] == ["0", "1"]
    with pytest.raises(InvalidRecord, match="got none"):
        packer.pack()


# -- parts of a batch ------------------------------------------------------------------------------------------------


@fewer
@given(many, st.data())
def test_selected_groups_are_as_if_packed_alone(shapes: list[tuple[int, ...]], data: st.DataObject) -> None:
    groups = [rich(shape, i, versions_by_token=True) for i, shape in enumerate(shapes)]
    keep = data.draw(st.lists(st.booleans(), min_size=len(groups), max_size=len(groups)).filter(any))

    selected = TrainBatch.pack(groups).select(np.array(keep))

    assert_same(selected, TrainBatch.pack(g for g, kept in zip(groups, keep, strict=True) if kept))


def test_selecting_nothing_is_refused() -> None:
    with pytest.raises(InvalidRecord, match="expected to keep at least one group"):
        batch(2).select(np.array([False, False]))


@fewer
@given(many, st.integers(1, 30))
def test_micro_batches_hold_every_sequence_once_and_keep_the_global_totals(
    shapes: list[tuple[int, ...]], max_tokens: int
) -> None:
    whole = TrainBatch.pack(rich(shape, i, versions_by_token=True) for i, shape in enumerate(shapes))

    parts = whole.split(max_tokens)

    assert [row for part in parts for row in rows(part)] == rows(whole)
    assert [i for part in parts for i in part.ids] == whole.ids
    assert all(len(part.tokens) <= max_tokens or len(part) == 1 for part in parts)
    assert {totals(part) for part in parts} == {totals(whole)}


def test_micro_batches_are_as_full_as_order_allows() -> None:
    whole = TrainBatch.pack([group(completion_lengths=[2, 2, 2, 4, 1])])

    assert [len(part.tokens) for part in whole.split(8)] == [8, 4, 6, 3]


# -- padding ---------------------------------------------------------------------------------------------------------


def test_padding_fills_the_right_with_values_of_no_meaning() -> None:
    packed = TrainBatch.pack([rich((1, 3))])

    padded = packed.padded(pad_token=9, length=6)

    assert padded.attention_mask.tolist() == [[True] * 3 + [False] * 3, [True] * 5 + [False]]
    assert padded.columns["tokens"].tolist() == [
        [*packed.tokens[:3].tolist(), 9, 9, 9],
        [*packed.tokens[3:].tolist(), 9],
    ]
    assert not padded.columns["loss_mask"][0, 3:].any()
    assert padded.columns["position_ids"].tolist() == [[0, 1, 2, 0, 0, 0], [0, 1, 2, 3, 4, 0]]
    assert padded.columns["teacher_ids"][0, 3:].tolist() == [[-1, -1]] * 3
    assert padded.columns["routed_experts"][0, 3:].tolist() == [[[0, 0]] * 3] * 3
    assert padded.columns["support_ids"][0, 3:].tolist() == [[-1] * 3] * 3
    assert padded.columns["advantages"][0, 3:].tolist() == [0, 0, 0]


@fewer
@given(many)
def test_without_padding_a_padded_batch_equals_the_batch(shapes: list[tuple[int, ...]]) -> None:
    packed = TrainBatch.pack(rich(shape, i) for i, shape in enumerate(shapes))

    padded = packed.padded()

    assert padded.attention_mask.shape == (len(packed), int(packed.lengths().max()))
    for name, column in padded.columns.items():
        original = getattr(packed, name)
        assert column.dtype == original.dtype
        assert column[padded.attention_mask].tobytes() == original.tobytes()


def test_a_sequence_longer_than_the_rectangle_is_refused() -> None:
    with pytest.raises(InvalidRecord, match="expected sequences of at most 7 tokens, got one of 8"):
        batch(completion_lengths=[6]).padded(length=7)


# -- travelling ------------------------------------------------------------------------------------------------------


@fewer
@given(many, st.booleans())
def test_columns_and_header_are_assembled_again_bit_for_bit(
    shapes: list[tuple[int, ...]],
    versions_by_token: bool,  # noqa: FBT001 (drawn)
) -> None:
    original = TrainBatch.pack(rich(s, i, versions_by_token=versions_by_token) for i, s in enumerate(shapes))

    again = TrainBatch.assemble(original.header(), original.columns())

    assert_same(again, original)
    assert_same(pickle.loads(pickle.dumps(original)), original)  # noqa: S301 (our own bytes)


def test_a_header_with_other_sequences_than_the_columns_is_refused() -> None:
    original, other = TrainBatch.pack([rich((3, 4))]), TrainBatch.pack([rich((3, 4)), rich((1, 2), 1)])

    with pytest.raises(InvalidRecord, match="header: expected groups of 4 sequences, got 2"):
        TrainBatch.assemble(original.header(), other.columns())


def test_a_header_with_a_negative_number_of_sequences_is_refused() -> None:
    packed = batch(groups=2)
    first, second = (group._asdict() for group in packed.groups)
    first["sequences"], second["sequences"] = -1, len(packed) + 1
    header = msgspec.msgpack.encode(([tuple(first.values()), tuple(second.values())], 1, 1))

    with pytest.raises(InvalidRecord, match="header: expected"):
        TrainBatch.assemble(header, packed.columns())


def test_a_header_that_makes_no_batch_is_refused() -> None:
    with pytest.raises(InvalidRecord, match="header: expected"):
        TrainBatch.assemble(b"\x93\x01", batch().columns())


def test_sequences_that_were_left_out_count_until_their_batch_is_trained() -> None:
    whole = TrainBatch.pack([group(instance_id=str(n)) for n in (1, 0)])
    whole = msgspec.structs.replace(whole, total_rollouts=len(whole) + 3)

    assert whole.in_order().total_rollouts == 7
    assert [part.total_rollouts for part in whole.split(max_tokens=1)] == [7] * 4
    assert whole.share(np.array([True, False, False, False])).total_rollouts == 7
    assert whole.select(np.array([True, False])).total_rollouts == 5
    assert TrainBatch.assemble(whole.header(), whole.columns()).total_rollouts == 7
