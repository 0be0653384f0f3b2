"""The numbers that callers pass: counts are whole, seconds are finite. Scalars of numpy are converted to int and float.

A number that is not converted here would be compared, multiplied and sent to other processes unchanged: a float where
a count is expected fails there, far from the line that passed it, and an integer of numpy is no `int`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import fields
from numbers import Real
from typing import Any

from msgspec import Struct, structs

from .bounds import LARGEST
from .errors import InvalidConfig


def whole_number(name: str, value: object, *, least: int = 1) -> int:
    """Return a count as an `int`.

    >>> whole_number("capacity", 2.5)
    Traceback (most recent call last):
    penstock.errors.InvalidConfig: capacity: expected a whole number of at least 1, got 2.5

    Raises:
        InvalidConfig: it is no integer, below `least`, or beyond 64 bits. A bool is no count.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise InvalidConfig(f"{name}: expected a whole number of at least {least}, got {value!r}")
    if number > LARGEST:
        raise InvalidConfig(f"{name}: expected a whole number below 2**63, got {value!r}")
    return number


def finite_number(name: str, value: object, *, zero: bool = False) -> float:
    """Return a number above 0, or from 0 on, as an `int` or a `float`: seconds, a temperature, a bound.

    Raises:
        InvalidConfig: it is no number, not finite, or too small. A bool is no number.
    """
    number = number_or_nan(value)
    if not (0 < number < math.inf or (zero and number == 0)):
        raise InvalidConfig(f"{name}: expected a finite number {'of 0 or more' if zero else 'above 0'}, got {value!r}")
    return value if isinstance(value, int) else number


def number_or_nan(value: object) -> float:
    """Return a number as a `float`; NaN, for which every comparison is false, for other values. A bool is no number."""
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan


def normalize_counts(owner: Any, *names: str, least: int = 1) -> None:
    """Convert each of these fields of a dataclass or Struct to `int`; None stays where the annotation has it.

    Raises:
        InvalidConfig: see `whole_number`; the message names class and field.
    """
    for name in _present(owner, names):
        number = whole_number(f"{type(owner).__name__}.{name}", getattr(owner, name), least=least)
        _set(owner, name, number)


def normalize_numbers(owner: Any, *names: str, zero: bool = False) -> None:
    """Convert each of these fields of a dataclass or Struct to a finite number; None stays where the annotation has it.

    Raises:
        InvalidConfig: see `finite_number`; the message names class and field.
    """
    for name in _present(owner, names):
        number = finite_number(f"{type(owner).__name__}.{name}", getattr(owner, name), zero=zero)
        _set(owner, name, number)


def _present(owner: Any, names: tuple[str, ...]) -> list[str]:
    """Return the fields that are not None, or must not be."""
    known: Iterable[Any] = structs.fields(owner) if isinstance(owner, Struct) else fields(owner)
    optional = {field.name for field in known if "None" in str(field.type)}
    return [name for name in names if getattr(owner, name) is not None or name not in optional]


def _set(owner: Any, name: str, number: float) -> None:
    if isinstance(owner, Struct):
        structs.force_setattr(owner, name, number)
    else:
        object.__setattr__(owner, name, number)
