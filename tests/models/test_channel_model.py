"""Every interleaving of send, publish, release, crash and restart that small channels have, searched to the end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from tests.models.channel_model import Channel

SCOPES: dict[str, tuple[Callable[[], Channel], int]] = {
    "two producers, of which any may be killed": (partial(Channel, (2, 1), copies=True), 59_201),
    "two producers, of which one is killed and started anew": (
        partial(Channel, (2, 2), (1,), kills=1, copies=True),
        40_643,
    ),
    "two producers, both killed and started anew, while the receiver lives": (
        partial(Channel, (2,), (1,), copies=True, receiver_may_die=False),
        37_817,
    ),
    "one producer, whose records are trained and let go in any order": (
        partial(Channel, (2, 1, 2), (1,), producers=1),
        64_535,
    ),
}
"""Records of 2 and 1 slots through segments of 3, and the number of states.

The number is a rule too: a step that can no longer be taken breaks no other. Where a core or the model has changed what
can happen on purpose, look at why it is another, and note it."""


SHORT_SCOPE = "two producers, of which one is killed and started anew"
"""The scope that `make test` searches: the smallest, in which everything can happen."""


@pytest.mark.parametrize(
    "scope", [pytest.param(scope, marks=[pytest.mark.long] if scope != SHORT_SCOPE else []) for scope in SCOPES]
)
def test_every_rule_holds_in_every_state(scope: str) -> None:
    make, states = SCOPES[scope]

    searched = make().search()

    print(f"{scope}: {searched} states")  # noqa: T201 (a search says how far it went)
    assert searched == states
