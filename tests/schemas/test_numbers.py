from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from penstock._schemas.numbers import finite_number, normalize_counts, normalize_numbers, whole_number
from penstock.errors import InvalidConfig


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3), np.array(3)])
def test_what_counts_as_an_integer_becomes_an_int(value: object) -> None:
    number = whole_number("capacity", value)

    assert (type(number), number) == (int, 3)


@pytest.mark.parametrize("value", [0, -1, 2.5, 2.0, math.nan, True, np.True_, np.float64(3), "3", None, [3]])
def test_a_count_that_is_none_is_refused_by_name_with_what_came(value: object) -> None:
    with pytest.raises(InvalidConfig) as refused:
        whole_number("capacity", value)

    assert str(refused.value) == f"capacity: expected a whole number of at least 1, got {value!r}"


@pytest.mark.parametrize("value", [3.0, np.float32(3), np.int64(3), Fraction(3)])
def test_what_counts_as_a_number_becomes_a_float(value: object) -> None:
    number = finite_number("timeout_s", value)

    assert (type(number), number) == (float, 3.0)


def test_an_int_stays_one_and_reads_as_it_was_written() -> None:
    assert str(finite_number("timeout_s", 7)) == "7"


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, True, np.True_, "3", None, Decimal(3)])
def test_a_number_that_is_none_is_refused_by_name_with_what_came(value: object) -> None:
    with pytest.raises(InvalidConfig) as refused:
        finite_number("timeout_s", value)

    assert str(refused.value) == f"timeout_s: expected a finite number above 0, got {value!r}"


def test_zero_is_a_number_where_it_is_said_to_be_one() -> None:
    assert finite_number("reconnect_timeout_s", 0, zero=True) == 0.0
    with pytest.raises(InvalidConfig, match="reconnect_timeout_s: expected a finite number of 0 or more, got -1"):
        finite_number("reconnect_timeout_s", -1, zero=True)


@dataclass(frozen=True, slots=True)
class Bounds:
    records: int | None = 1
    wait_s: float = 1.0

    def __post_init__(self) -> None:
        normalize_counts(self, "records")
        normalize_numbers(self, "wait_s")


def test_only_a_field_that_is_said_to_be_optional_may_be_none() -> None:
    assert Bounds(records=None).records is None
    with pytest.raises(InvalidConfig, match=r"Bounds\.wait_s: expected a finite number above 0, got None"):
        Bounds(wait_s=None)  # type: ignore[arg-type]
