"""Change the values of a configuration at the places of a key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def changed_at(values: Any, key: str, change: Callable[[Any], Any]) -> Any:
    """Return `values` with the value at `key` changed, if there is one; `[]` in it is any place of a list.

    >>> changed_at({"sets": [{"path": "a"}, {}]}, "sets.[].path", str.upper)
    {'sets': [{'path': 'A'}, {}]}
    """
    if not key:
        return change(values)
    first, _, rest = key.partition(".")
    if first == "[]" and isinstance(values, list | tuple):
        return [changed_at(each, rest, change) for each in values]
    if isinstance(values, Mapping) and first in values:
        return {**values, first: changed_at(values[first], rest, change)}
    return values
