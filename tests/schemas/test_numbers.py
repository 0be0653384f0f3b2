from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from penstock._schemas.numbers import finite_number, normalize_counts, normalize_numbers, whole_number
from penstock.errors import InvalidConfig


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3), np.array(3)])
def test_integral_values_become_ints(value: object) -> None:
    number = whole_number("capacity", value)

    assert (type(number), number) == (int, 3)


@pytest.mark.parametrize("value", [3.0, np.float32(3), np.int64(3), Fraction(3)])
def test_numeric_values_become_floats(value: object) -> None:
    number = finite_number("timeout_s", value)

    assert (type(number), number) == (float, 3.0)


def test_an_int_stays_one_and_reads_as_it_was_written() -> None:
    assert str(finite_number("timeout_s", 7)) == "7"


COUNTS: list[object] = [0, -1, 2.5, 2.0, math.nan, True, np.True_, np.float64(3), "3", None, [3]]
NUMBERS: list[object] = [0, -1.0, math.nan, math.inf, True, np.True_, "3", None, Decimal(3)]


@pytest.mark.parametrize(
    ("check", "value", "expected"),
    [
        *((whole_number, value, "a whole number of at least 1") for value in COUNTS),
        *((finite_number, value, "a finite number above 0") for value in NUMBERS),
    ],
)
def test_an_invalid_number_is_refused_by_name_and_value(
    check: Callable[[str, object], object], value: object, expected: str
) -> None:
    with pytest.raises(InvalidConfig) as refused:
        check("an option", value)

    assert str(refused.value) == f"an option: expected {expected}, got {value!r}"


def test_zero_is_valid_where_it_is_permitted() -> None:
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


def test_only_an_optional_field_may_be_none() -> None:
    assert Bounds(records=None).records is None
    with pytest.raises(InvalidConfig, match=r"Bounds\.wait_s: expected a finite number above 0, got None"):
        Bounds(wait_s=None)  # type: ignore[arg-type]
