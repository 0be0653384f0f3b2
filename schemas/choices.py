"""The choices that callers pass by name: `"drop"`, `"fail"`, `"k3"`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

from .errors import InvalidConfig


def check_choice(name: str, value: object, choices: Any) -> None:
    """Compare a value with the choices for it, a `Literal` or names.

    >>> from typing import Literal
    >>> check_choice("mode", "rar", Literal["raw", "text"])
    Traceback (most recent call last):
    penstock.errors.InvalidConfig: mode: expected one of raw, text, got 'rar'

    Raises:
        InvalidConfig: it is not among them.
    """
    names: Iterable[str] = get_args(choices) or choices
    if value not in (known := tuple(names)):
        raise InvalidConfig(f"{name}: expected one of {', '.join(known)}, got {value!r}")
