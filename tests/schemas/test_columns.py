from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock._schemas.columns import as_column
from penstock.errors import InvalidRecord


def test_an_array_that_fits_is_taken_as_it_is() -> None:
    given = np.arange(3, dtype=np.int32)

    assert as_column("tokens", given, np.int32) is given


def test_an_array_that_begins_in_the_middle_of_an_item_is_copied_onto_whole_items() -> None:
    given = np.frombuffer(b"?" + np.arange(3, dtype=np.int32).tobytes(), np.int32, offset=1)

    column = as_column("tokens", given, np.int32)

    assert not given.flags.aligned
    assert column.flags.aligned
    assert column.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, 2], np.int32),
        (np.array([1, 2], np.int64), np.int32),
        (np.array([1, 2], np.uint8), np.int64),
        ([1, 2], np.float32),
        (np.array([1.0, 2.0]), np.float32),
        ([True, False], np.float32),
    ],
)
def test_values_are_converted_where_nothing_is_lost(values: Any, dtype: Any) -> None:
    column = as_column("c", values, dtype)

    assert column.dtype == dtype
    assert column.tolist() == list(values)


def test_zeros_and_ones_serve_as_a_mask() -> None:
    assert as_column("loss_mask", [0, 1], np.bool_).tolist() == [False, True]


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([0.5], np.int32),
        ([1.0], np.int64),
        ([True], np.int32),
        ([2], np.bool_),
        ([0.0], np.bool_),
        ([2**31], np.int32),
        ([-1], np.uint8),
        ([2**70], np.int64),
        (["1"], np.int32),
        ([None], np.float32),
        ([1j], np.float32),
        ([b"1"], np.uint8),
        (np.array([np.datetime64("2024-01-01")]), np.int64),
    ],
)
def test_values_that_would_change_their_meaning_are_refused(values: Any, dtype: Any) -> None:
    with pytest.raises(InvalidRecord, match=f"c: expected dtype {np.dtype(dtype)}, got "):
        as_column("c", values, dtype)


def test_rows_of_uneven_length_are_refused_by_name() -> None:
    with pytest.raises(InvalidRecord, match="c: expected int32 values, got rows of uneven length"):
        as_column("c", [[1, 2], [3]], np.int32)


def test_no_values_have_any_dtype() -> None:
    assert as_column("c", [], np.int32).dtype == np.int32
    assert as_column("c", np.zeros((0, 4)), np.int32).shape == (0, 4)


def test_a_strided_array_becomes_contiguous() -> None:
    column = as_column("c", np.arange(6, dtype=np.int32)[::2], np.int32)

    assert column.flags.c_contiguous
    assert column.tolist() == [0, 2, 4]
