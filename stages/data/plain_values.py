"""Values of a row as JSON can hold them: the row crosses process borders in the `meta` of its group."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import numpy as np

from ..._pipeline.errors import InvalidData


def plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with every value converted.

    Arrays and scalars of numpy become lists and numbers, dates their text in ISO 8601, decimals their text, and numbers
    that are not finite None, as in JSON.

    >>> from datetime import date
    >>> plain_row({"answer": np.int64(7), "born": date(1906, 12, 9), "parts": (1.5, float("nan"))})
    {'answer': 7, 'born': '1906-12-09', 'parts': [1.5, None]}

    Raises:
        InvalidData: JSON has no such value; the message names the column.
    """
    return {str(column): _plain(value, str(column)) for column, value in row.items()}


def _plain(value: Any, column: str) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(each, column) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, column) for each in value]
    return _plain_scalar(value, column)


def _plain_scalar(value: Any, column: str) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if callable(isoformat := getattr(value, "isoformat", None)):  # a date, a time of day
        return isoformat()
    if isinstance(value, Decimal):
        return str(value)
    raise InvalidData(
        f"column {column!r}: expected text, numbers, truth values, dates, lists and mappings with keys of text, got "
        f"{type(value).__name__}: remove the column, or convert it"
    )
