"""Functions and other objects that a mapping gives a configuration as values, in place of `module:function`.

    load_run_config({"reward": {"functions": [{"function": correct}]}, …})

A configuration is plain values, kept as JSON in its folder: each object gets a name, and this process finds it by that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..._pipeline.util.named_objects import name_of
from .places import changed_at

PLACES = (
    "reward.functions.[].function",
    "environment.make",
    "environment.agent",
    "environment.tools",
    "environment.tool_calls",
    "environment.mix.[].make",
    "environment.mix.[].agent",
    "algorithm.loss",
    "evaluation.answer",
    "evaluation.environments.[].make",
    "trackers.[]",
    "prepare",
)
"""The keys that name code; `[]` is any place."""


def with_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with names for the objects that are given as values. A number at such a place is refused later."""
    changed: Any = dict(values)
    for key in PLACES:
        changed = changed_at(changed, key, _named)
    return dict(changed)


def _named(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float | list | tuple | Mapping) else name_of(value)
