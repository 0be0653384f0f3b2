"""Values of a row as JSON can hold them: the row crosses process borders in the `meta` of its group."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np

from ..._pipeline.errors import InvalidData


def plain_row(row: Mapping[str, Any], place: Callable[[], str]) -> dict[str, Any]:
    """Return a row with every value converted.

    Arrays and scalars of numpy become lists and numbers, dates their text in ISO 8601, decimals and fractions their
    text, and numbers that are not finite None, as in JSON. Keys of mappings become the text that JSON has for them.

    >>> from datetime import date
    >>> plain_row({"answer": np.int64(7), "born": date(1906, 12, 9), "parts": (1.5, float("nan"))}, lambda: "row 0")
    {'answer': 7, 'born': '1906-12-09', 'parts': [1.5, None]}

    Args:
        row: values by column.
        place: returns the row's place, for a message.

    Raises:
        InvalidData: JSON, or msgpack, has no such value; the message has the place of the row, and the column.
    """
    plain: dict[str, Any] = {}
    for name, value in row.items():
        column = str(name)
        try:
            plain[_plain_text(column)] = _plain(value)
        except _NoJson as error:
            raise InvalidData(f"{place()}: column {column!r}: expected {error}") from None
        except RecursionError:
            expected = "at most some hundred levels of lists and mappings, got more"
            raise InvalidData(f"{place()}: column {column!r}: expected {expected}") from None
    return plain


class _NoJson(Exception):
    """A value that JSON cannot hold; the text goes on after "expected"."""


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        is_time = value.dtype.kind in "mM"  # in nanoseconds, tolist() would return bare numbers
        value = (value.astype(f"{value.dtype.kind}8[us]") if is_time else value).tolist()
    if isinstance(value, Mapping):
        return _plain_mapping(value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return _plain_scalar(value)


def _plain_mapping(mapping: Mapping[Any, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, value in mapping.items():
        text = _plain_key(key)
        if text in plain:
            raise _NoJson(f"mappings with one value for each key, got two for {text!r}, as text and as a number")
        plain[text] = _plain(value)
    return plain


def _plain_key(key: Any) -> str:
    """Return the text of a key, as `json.dumps` writes it: '0', '1.5', 'true', 'null'."""
    own = key.item() if isinstance(key, np.generic) else key
    if isinstance(own, str):
        return _plain_text(own)
    if own is None or isinstance(own, bool | int | float):
        return json.dumps(_plain_scalar(own))
    raise _NoJson(
        f"mappings with keys of text, numbers or truth values, got one of {type(own).__name__}: remove the column, or "
        f"convert it"
    )


def _plain_scalar(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _plain_text(value)
    if isinstance(value, int):
        return _plain_int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if callable(isoformat := getattr(value, "isoformat", None)):  # a date, a time of day
        return isoformat()
    if isinstance(value, Decimal | Fraction):
        return str(value)
    raise _NoJson(
        f"text, numbers, truth values, dates, lists and mappings, got {type(value).__name__}: "
        f"remove the column, or convert it"
    )


def _plain_text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        excerpt = value[max(0, error.start - 8) : error.end + 8]
        raise _NoJson(f"text of Unicode, got a lone surrogate in {excerpt!r}: remove it") from None
    return str.__str__(value)  # of a class of its own too, such as an Enum


def _plain_int(value: int) -> int:
    if not -(2**63) <= value < 2**64:
        sign = " and a sign" if value < 0 else ""
        raise _NoJson(f"whole numbers of at most 64 bits, got one of {value.bit_length()} bits{sign}: write it as text")
    return int(value)
