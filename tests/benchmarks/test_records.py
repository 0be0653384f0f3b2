"""The benchmark's consumer detects a wrong batch of any transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import starmap

import msgspec
import numpy as np
import pytest
from benchmarks.records import (
    CHECK_WHOLE_EVERY,
    COLUMNS,
    EDGED,
    Batch,
    Checker,
    Packing,
    WrongContents,
    make_groups,
    plain,
)

from penstock import TrainBatch, TrajectoryGroup
from penstock.records import Packer

GROUP, TOKENS, PRODUCERS = 2, 64, 2

Sent = tuple[int, int]
"""The number of a producer, and of one of its groups."""

IN_ORDER: Sequence[Sent] = [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1)]


def group_of(producer: int, number: int) -> TrajectoryGroup:
    groups = make_groups(producer, group=GROUP, tokens=TOKENS)
    return msgspec.structs.replace(groups[number % len(groups)], instance_id=str(number))


def packed_by_penstock(groups: list[TrajectoryGroup]) -> Batch:
    packer = Packer(len(groups) * GROUP * TOKENS)
    for group in groups:
        packer.add(group)
    return packer.pack()


def packed_as_peers_do(groups: list[TrajectoryGroup]) -> Batch:
    packing = Packing(GROUP, TOKENS)
    for group in groups:
        packing.add(plain(group))
    return packing.pack()


def checker(*, checked: int = 0) -> Checker:
    """Return a checker after `seen` batches, all of them empty."""
    fresh = Checker(producers=PRODUCERS, group=GROUP, tokens=TOKENS)
    empty = msgspec.structs.replace(train_batch(IN_ORDER), groups=(), cu_seqlens=np.zeros(1, np.int64))
    nothing = {name: getattr(empty, name)[:0] for name in (*COLUMNS, "rewards", "rollout_ids")}
    for _ in range(checked):
        fresh.check(msgspec.structs.replace(empty, **nothing))
    return fresh


def train_batch(sent: Sequence[Sent]) -> TrainBatch:
    batch = packed_by_penstock(list(starmap(group_of, sent)))
    assert isinstance(batch, TrainBatch)
    return batch


@pytest.mark.parametrize("pack", [packed_by_penstock, packed_as_peers_do])
@pytest.mark.parametrize("checked", [0, 1])
def test_the_sent_batch_passes(pack: Callable[[list[TrajectoryGroup]], Batch], checked: int) -> None:
    seen = checker(checked=checked)

    seen.check(pack(list(starmap(group_of, IN_ORDER))))
    seen.check(pack([group_of(1, 2), group_of(0, 3)]))
    seen.finish({0: 4, 1: 3})

    assert seen.received == 7


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        pytest.param([(0, 0), (0, 2)], "expected group 1 .* got 2", id="lost"),
        pytest.param([(0, 0), (0, 0)], "expected group 1 .* got 0", id="doubled"),
        pytest.param([(0, 1), (0, 0)], "expected group 0 .* got 1", id="swapped"),
        pytest.param([(0, 0), (7, 0)], "got one of 'bench-7'", id="a stranger's"),
    ],
)
def test_groups_that_are_lost_doubled_swapped_or_strange_are_noticed(sent: list[Sent], message: str) -> None:
    with pytest.raises(WrongContents, match=message):
        checker(checked=1).check(train_batch(sent))


def test_a_group_under_the_name_of_another_is_noticed_by_its_edges() -> None:
    misnamed = msgspec.structs.replace(group_of(0, 5), instance_id="0")

    with pytest.raises(WrongContents, match="tokens: a sequence begins or ends"):
        checker(checked=1).check(packed_by_penstock([misnamed]))


def test_a_group_that_never_came_is_noticed_at_the_end() -> None:
    seen = checker()
    seen.check(train_batch(IN_ORDER))

    with pytest.raises(WrongContents, match="producer 1 sent 3 groups, 2 arrived"):
        seen.finish({0: 3, 1: 3})


@pytest.mark.parametrize("sequence", range(len(IN_ORDER) * GROUP))
@pytest.mark.parametrize("edge", [0, TOKENS - 1])
def test_a_wrong_token_at_any_edge_is_noticed_in_every_batch(sequence: int, edge: int) -> None:
    batch = with_one_value_changed(train_batch(IN_ORDER), "tokens", sequence * TOKENS + edge)

    with pytest.raises(WrongContents, match="tokens"):
        checker(checked=1).check(batch)


@pytest.mark.parametrize("turn", range(len(EDGED)))
@pytest.mark.parametrize("edge", [0, GROUP * TOKENS - 1])
def test_further_columns_take_turns_in_having_their_edges_checked(turn: int, edge: int) -> None:
    wrong = [with_one_value_changed(train_batch(IN_ORDER), name, edge) for name in EDGED]

    noticed = []
    for batch in wrong:
        try:
            checker(checked=len(EDGED) + turn).check(batch)
        except WrongContents:
            noticed.append(batch)

    assert [wrong.index(batch) for batch in noticed] == [turn]


@pytest.mark.parametrize("name", [*COLUMNS, "rewards", "rollout_ids"])
def test_any_wrong_value_is_noticed_where_a_batch_is_checked_wholly(name: str) -> None:
    middle = 3 if name in {"rewards", "rollout_ids"} else TOKENS + TOKENS // 2
    batch = with_one_value_changed(train_batch(IN_ORDER), name, middle)
    unnoticed = checker(checked=1)

    unnoticed.check(batch)  # not an edge
    with pytest.raises(WrongContents):
        checker().check(batch)
    with pytest.raises(WrongContents):
        checker(checked=CHECK_WHOLE_EVERY).check(batch)


def test_a_missing_column_and_one_of_another_dtype_are_noticed() -> None:
    batch = train_batch(IN_ORDER)

    with pytest.raises(WrongContents, match="ref_logprobs: expected float32, got None"):
        checker().check(msgspec.structs.replace(batch, ref_logprobs=None))
    with pytest.raises(WrongContents, match="tokens: expected int32, got int64"):
        checker().check(msgspec.structs.replace(batch, tokens=batch.tokens.astype(np.int64)))


def test_sequences_that_are_cut_elsewhere_are_noticed() -> None:
    batch = train_batch(IN_ORDER)
    bounds = batch.cu_seqlens.copy()
    bounds[1] += 1

    with pytest.raises(WrongContents, match="expected 10 sequences of 64 tokens"):
        checker(checked=1).check(msgspec.structs.replace(batch, cu_seqlens=bounds))


def with_one_value_changed(batch: TrainBatch, name: str, index: int) -> TrainBatch:
    column = getattr(batch, name).copy()
    column[index] = not column[index] if column.dtype == np.bool_ else column[index] + max(1, abs(column[index]) / 2)
    return msgspec.structs.replace(batch, **{name: column})
