from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock import TrainBatch
from penstock._stages.models.micro_batches import MicroBatch, lay_out, micro_batches
from penstock.errors import InvalidRecord
from penstock.testing import batch

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(0, 12), max_size=30)


def made(lengths: list[int]) -> TrainBatch:
    """Return a group of completions of those lengths after a prompt of 2, some masked; tokens count from 0."""
    packed = batch(groups=1, completion_lengths=lengths, prompt_length=2)
    numbers = np.arange(len(packed.tokens), dtype=np.int32)
    return msgspec.structs.replace(packed, tokens=numbers, loss_mask=packed.loss_mask & (numbers % 5 != 0))


@given(LENGTHS, st.integers(1, 40))
def test_every_sequence_lies_in_one_row_and_no_micro_batch_is_over_its_budget(lengths: list[int], budget: int) -> None:
    laid = lay_out(lengths, budget)

    placed = Counter(sequence for rows in laid for row in rows for sequence in row)
    assert placed == Counter(s for s, length in enumerate(lengths) if length)
    for rows in laid:
        width = max(lengths[s] for row in rows for s in row)
        assert all(sum(lengths[s] for s in row) <= width for row in rows)
        assert len(rows) * width <= budget or len(rows) == 1


@given(LENGTHS)
def test_without_a_budget_there_is_one_micro_batch_at_least_half_full_but_for_a_row(lengths: list[int]) -> None:
    laid = lay_out(lengths, None)

    assert len(laid) == any(lengths)
    for rows in laid:
        assert 2 * sum(lengths) >= (len(rows) - 1) * max(lengths)


def test_short_sequences_fill_up_the_rows_of_long_ones() -> None:
    assert lay_out([2, 10, 4, 6, 3, 5], None) == [[[1], [3, 2], [5, 4, 0]]]
    assert lay_out([2, 10, 4, 6, 3, 5], 20) == [[[1], [3, 2]], [[5], [4, 0]]]


def test_rows_too_wide_for_a_dense_mask_have_one_sequence() -> None:
    assert lay_out([4000, 2000, 1000], None) == [[[0], [1, 2]]]
    assert lay_out([5000, 2000, 1000], None) == [[[0], [1], [2]]]
    assert lay_out([5000, 2000, 1000], 6000) == [[[0]], [[1], [2]]]


def test_positions_continue_over_the_padding_so_that_a_row_of_one_sequence_needs_no_mask() -> None:
    (laid,) = micro_batches(batch(groups=1, completion_lengths=[6, 4], prompt_length=1), {}, None, torch.device("cpu"))

    assert laid.sequences.tolist() == [[0] * 7, [1] * 5 + [-1] * 2]
    assert laid.positions.tolist() == [[*range(7)]] * 2


@given(LENGTHS, st.integers(1, 40) | st.none())
def test_starts_are_where_the_sequence_of_a_token_is_another_than_that_before_or_a_row_begins(
    lengths: list[int], budget: int | None
) -> None:
    for part in micro_batches(made(lengths), {}, budget, CPU) if lengths else ():
        width = part.tokens.shape[1]
        flat = part.sequences.flatten().tolist()
        expected = [at for at in range(len(flat)) if at % width == 0 or flat[at] != flat[at - 1]]
        assert part.cu_seqlens.dtype == torch.int32
        assert part.cu_seqlens.tolist() == [*expected, len(flat)]


@pytest.mark.parametrize("budget", [None, 1, 16, 24])
def test_every_token_is_where_the_model_and_the_loss_look_for_it(budget: int | None) -> None:
    packed = made([3, 9, 1, 4, 2, 2])
    trained: list[int] = []

    for part in micro_batches(packed, {"number": np.arange(len(packed.tokens))}, budget, CPU):
        check_rows(part)
        trained += part.targets.tolist()
        before = part.tokens.flatten()[part.predicted_at]
        assert (before == part.targets - 1).all()
        assert part.columns["number"].tolist() == part.targets.tolist()

    assert sorted(trained) == np.flatnonzero(packed.loss_mask).tolist()


def test_nothing_is_computed_for_sequences_in_which_nothing_trains() -> None:
    packed = made([12, 3, 12])
    mask = packed.loss_mask.copy()
    mask[packed.cu_seqlens[0] : packed.cu_seqlens[1]] = mask[packed.cu_seqlens[2] :] = False

    (part,) = micro_batches(msgspec.structs.replace(packed, loss_mask=mask), {}, None, CPU)

    assert part.tokens.tolist() == [packed.tokens[packed.cu_seqlens[1] : packed.cu_seqlens[2]].tolist()]
    assert part.lengths.tolist() == [mask.sum()]


def check_rows(part: MicroBatch) -> None:
    """Check that a sequence's tokens are consecutive, at positions from 0 on, and its trained ones in order."""
    counted = []
    for sequence in range(len(part.lengths)):
        here = part.sequences == sequence
        tokens = part.tokens[here].tolist()
        assert tokens == list(range(tokens[0], tokens[0] + len(tokens)))
        assert part.positions[here].tolist() == list(range(len(tokens)))
        counted += [sequence] * int(part.lengths[sequence])
    assert part.sequences.flatten()[part.predicted_at].tolist() == counted
    first = part.tokens[:, :1].expand_as(part.tokens)
    assert torch.equal(part.tokens[part.sequences < 0], first[part.sequences < 0])


def test_a_first_token_that_is_to_train_is_refused_as_nothing_predicts_it() -> None:
    packed = made([3, 4])
    mask = packed.loss_mask.copy()
    mask[packed.cu_seqlens[1]] = True

    with pytest.raises(InvalidRecord, match="loss_mask: expected false on the first token of every sequence"):
        micro_batches(msgspec.structs.replace(packed, loss_mask=mask), {}, None, CPU)
