"""Every order of pieces of a few groups, copies of them and deadlines, by exhaustive search."""

from __future__ import annotations

from typing import Any

import pytest
from tests.cells import cells
from tests.models.group_buffer_model import states

SCOPES: dict[str, tuple[dict[str, Any], int]] = {
    "two groups, every piece of which may come twice": (
        {"prompts": 2, "most": 2, "ticks": 3, "max_groups": 2, "max_closed": 2},
        2_240,
    ),
    "three groups that share two places, of which one is remembered": (
        {"prompts": 3, "most": 1, "ticks": 2, "max_groups": 2, "max_closed": 1},
        2_972,
    ),
}
"""The scopes of the search, and the number of states of each, which is asserted as in test_channel_model."""


@pytest.mark.parametrize("scope", cells(SCOPES, run=["two groups, every piece of which may come twice"]))
def test_every_rule_holds_in_every_state(scope: str) -> None:
    limits, expected = SCOPES[scope]

    searched = states(**limits)

    print(f"{scope}: {searched} states")  # noqa: T201 (a search says how far it went)
    assert searched == expected
