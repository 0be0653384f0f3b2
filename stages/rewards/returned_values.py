"""Read the values that a function returned for a group, as a list in the order of its completions."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any


def listed(returned: Any) -> list[Any]:
    """Return the values of a list, a tuple, a generator, an array of numpy, a tensor or a Series.

    >>> listed(number for number in (1, 2))
    [1, 2]

    Raises:
        TypeError: it has no values in an order: it is text, a mapping or a set, or one value.
    """
    if isinstance(returned, str | bytes | Mapping | AbstractSet):
        raise TypeError(f"expected a list with a value for each completion, got {type(returned).__name__}")
    return list(returned.tolist() if hasattr(returned, "tolist") else returned)
